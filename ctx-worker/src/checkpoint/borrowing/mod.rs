//! A client that borrows memory: large allocations whose content is a template's, mapped for reading only until the client writes
//! there. So clients of one image share what they only read.
//!
//! ```text
//!   command ──► which borrowed allocations may it write?
//!      copies, memsets; parameters that kernels write through      memory of its own ──► driver
//!      parameters that nobody has watched                          memory of its own ──► driver ──► idle, compare
//!      parameters that kernels only read through                   ──► driver          the same, often enough:
//!                                                                                         borrowed again
//! ```
//!
//! Parameters alone do not tell what a kernel writes: those of cuBLAS name the weights as the result. So it is learned for each
//! kernel and parameter, by comparing the content of what is named before and after the first launches. A launch counts only if it
//! has changed some memory: a kernel may write what was there before, as computations do that have converged. What was learned goes to
//! the daemon, which keeps it with the image: the next client of the image begins with it, and has memory of its own for what
//! former ones wrote.
//!
//! A write that nobody has foreseen changes nothing: the memory is read-only, and the context ends with error 700. The daemon
//! then kills the process, and the kernels that ran are not trusted any more.

mod lend;
pub(in crate::checkpoint) mod record;

use std::collections::{BTreeSet, HashMap};

use rekindle_images::content::ContentHash;
use rekindle_wire::control::Learned;
use rekindle_wire::window;
use tracing::error;

pub(crate) use self::lend::lend;
use self::record::{KernelId, Record, Verdict};
use crate::checkpoint::access::set::{Access, Set};
use crate::checkpoint::access::tracker::Tracker;
use crate::resources::Memory;
use crate::resources::units::Unit;

/// An allocation: the worker's number of its device, and its address.
pub(in crate::checkpoint) type Place = (usize, u64);

/// Tells the daemon what was learned, and why the client cannot go on, if it cannot.
pub(crate) type Tell = Box<dyn Fn(&Learned, Option<String>) + Send>;

/// What a client that borrows memory knows of its commands' writes.
pub(crate) struct Borrowing {
    pub(in crate::checkpoint) record: Record,
    tell: Tell,
    /// Graphs whose launches write nothing borrowed, each with the version of all that decides that.
    harmless: HashMap<u64, (u64, Vec<KernelId>)>,
}

/// A launch whose writes are watched.
pub(crate) struct Trial {
    /// The parameters that nobody has watched often enough, each with an allocation that it names.
    pub(in crate::checkpoint) slots: Vec<(KernelId, u32, Place)>,
    /// What the kernels of these parameters may write in all.
    pub(in crate::checkpoint) named: BTreeSet<(KernelId, Unit)>,
    /// The content of these allocations before the launch.
    pub(in crate::checkpoint) before: Contents,
}

/// The content of allocations.
pub(in crate::checkpoint) type Contents = HashMap<Unit, Vec<ContentHash>>;

/// What is to be done before a command.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::checkpoint) struct Plan {
    /// Allocations that the command may write.
    pub(in crate::checkpoint) written: BTreeSet<Place>,
    /// Allocations that the command may write as far as this client knows: others may learn more.
    pub(in crate::checkpoint) unclear: BTreeSet<Place>,
    /// Parameters that nobody has watched often enough, each with an allocation that it names.
    pub(in crate::checkpoint) watched: Vec<(KernelId, u32, Place)>,
    /// What the kernels of these parameters may write in all.
    pub(in crate::checkpoint) named: BTreeSet<(KernelId, Unit)>,
    /// The kernels that are launched.
    pub(in crate::checkpoint) kernels: BTreeSet<KernelId>,
}

impl Borrowing {
    pub(crate) fn new(learned: Learned, tell: Tell) -> Self {
        Self { record: Record::new(learned), tell, harmless: HashMap::new() }
    }

    /// Allocations that other clients of the image have written.
    pub(crate) fn written(&self) -> &BTreeSet<u64> {
        self.record.written()
    }

    pub(in crate::checkpoint) fn tell_news(&mut self) {
        let news = self.record.take_news();
        if !news.is_empty() {
            (self.tell)(&news, None);
        }
    }

    /// A graph is launched: whether that writes nothing borrowed, as an earlier launch has shown.
    pub(in crate::checkpoint) fn is_harmless(&mut self, graph: u64, memory: &Memory) -> bool {
        let version = self.version(memory);
        let Some((_, kernels)) = self.harmless.get(&graph).filter(|(of, _)| *of == version) else { return false };
        self.record.launches_again(kernels);
        true
    }

    /// A launch of this graph, which has these functions, writes nothing borrowed.
    pub(in crate::checkpoint) fn found_harmless(&mut self, graph: u64, memory: &Memory, kernels: BTreeSet<KernelId>) {
        self.harmless.insert(graph, (self.version(memory), kernels.into_iter().collect()));
    }

    /// A graph was changed or destroyed.
    pub(in crate::checkpoint) fn graph_changed(&mut self, graph: u64) {
        self.harmless.remove(&graph);
    }

    fn version(&self, memory: &Memory) -> u64 {
        let borrowed: u64 = memory.devices.iter().map(|device| device.memory.borrowed_version()).sum();
        borrowed + self.record.version()
    }

    /// The client cannot go on.
    pub(in crate::checkpoint) fn give_up(&mut self, why: String) {
        error!("{why}");
        (self.tell)(&self.record.take_news(), Some(why));
    }

    pub(in crate::checkpoint) fn plan(
        &mut self,
        tracker: &Tracker,
        memory: &Memory,
        access: &Access,
        exported: Option<u64>,
    ) -> Plan {
        let mut plan = Plan::default();
        let place = |address: u64| {
            let mut devices = memory.devices.iter().enumerate();
            devices.find_map(|(ordinal, device)| Some((ordinal, device.memory.borrowed_at(address)?)))
        };
        let kernels: Vec<_> = access.functions.iter().map(|it| (*it, self.record.launches(tracker, *it))).collect();
        let everything = kernels.iter().any(|(_, id)| id.is_some_and(|id| self.record.writes_everything(id)));
        match &access.writes {
            Set::Units(units) if !everything => plan.written.extend(units.iter().filter_map(|unit| place(unit.start))),
            _ => plan.written = all_places(memory),
        }
        plan.written.extend(exported.and_then(place));
        plan.kernels = kernels.iter().filter_map(|(_, id)| *id).collect();
        let ids: HashMap<u64, KernelId> = kernels.into_iter().filter_map(|(it, id)| Some((it, id?))).collect();
        for (slot, unit) in access.slots.iter().flatten() {
            let Some(&kernel) = ids.get(&slot.function) else { continue };
            if is_allocation(memory, *unit) {
                plan.named.insert((kernel, *unit));
            }
            let Some(place) = place(unit.start) else { continue };
            match self.record.verdict(kernel, slot.offset) {
                Verdict::Reads => {}
                Verdict::Writes => _ = plan.written.insert(place),
                Verdict::Unclear => _ = plan.unclear.insert(place),
                Verdict::Unknown { .. } => plan.watched.push((kernel, slot.offset, place)),
            }
        }
        plan.watched.retain(|(_, _, place)| !plan.written.contains(place) && !plan.unclear.contains(place));
        plan.watched.sort_unstable();
        plan.watched.dedup();
        plan.named.retain(|(kernel, _)| plan.watched.iter().any(|it| it.0 == *kernel));
        plan
    }
}

impl Plan {
    pub(in crate::checkpoint) fn places(&self) -> BTreeSet<Place> {
        let kept = self.written.union(&self.unclear).copied();
        kept.chain(self.watched.iter().map(|it| it.2)).collect()
    }
}

pub(in crate::checkpoint) fn all_places(memory: &Memory) -> BTreeSet<Place> {
    let devices = memory.devices.iter().enumerate();
    devices.flat_map(|(ordinal, device)| device.memory.borrowed().map(move |base| (ordinal, base))).collect()
}

/// Whether a unit is an allocation in the window of a device, which that device can read.
fn is_allocation(memory: &Memory, unit: Unit) -> bool {
    let device = window::device_of(unit.start).and_then(|ordinal| memory.devices.get(ordinal));
    device.is_some_and(|it| it.memory.allocations().contains_key(&unit.start))
}

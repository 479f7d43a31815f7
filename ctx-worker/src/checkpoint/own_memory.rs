//! Gives a client that borrows memory ([`crate::checkpoint::borrowing`]) memory of its own before its commands may write, and
//! watches the launches whose writes are not known.
//!
//! Memory is exchanged behind its addresses while nothing runs: `cuMemUnmap` does not wait for work that uses the memory.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rekindle_cuda_abi::types::*;
use rekindle_images::content::ContentHash;
use rekindle_wire::command;
use rekindle_wire::window;
use tracing::{debug, info, warn};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::access::client::ClientView;
use crate::checkpoint::access::hash::{BATCH_BYTES, Hasher};
use crate::checkpoint::borrowing::record::{KernelId, Seen, Verdict};
use crate::checkpoint::borrowing::{Contents, Place, Plan, Trial, all_places};
use crate::checkpoint::copying::clones;
use crate::checkpoint::copying::guard::listed;
use crate::checkpoint::layers::Layers;
use crate::gpu::driver::{CallFailed, Driver, checked};
use crate::resources::Memory;
use crate::resources::memory::borrowed::OwnError;
use crate::resources::units::Unit;
use crate::schedule::dependencies::word;
use crate::schedule::rest::comes_to_rest;
use crate::session::Session;

/// How long work that reads borrowed memory may take before that memory is exchanged. A kernel that waits for a later command
/// never ends.
const READERS: Duration = Duration::from_secs(60);
/// How long the work before a launch may take whose parameters nobody has seen.
const UNSEEN: Duration = Duration::from_secs(10);
/// How long a launch may take that is watched, and the work before it.
const WATCHED: Duration = Duration::from_millis(500);

impl Checkpoint {
    /// Called before a command goes to the driver: gives memory of its own to what the command may write. Returns what is to be
    /// watched when the command is over.
    ///
    /// # Errors
    /// There is no memory ([`CUDA_ERROR_OUT_OF_MEMORY`], nothing is lost), or the client cannot go on.
    pub(crate) fn own_what_is_written(
        &mut self,
        layers: &mut Layers<'_>,
        parameters: &[u8],
    ) -> Result<Option<Trial>, CUresult> {
        let Some(borrowing) = &mut self.borrowing else { return Ok(None) };
        let Layers { call, memory, code, .. } = layers;
        if memory.devices.iter().all(|device| device.memory.borrows_nothing()) {
            info!("the client has memory of its own for everything");
            self.borrowing = None;
            return Ok(None);
        }
        // A graph of a thousand kernels names thousands of addresses.
        let graph = (call.header.call == command::GRAPH_LAUNCH).then(|| word(parameters, 0)).flatten();
        if graph.is_some_and(|graph| borrowing.is_harmless(graph, memory)) {
            return Ok(None);
        }
        if call.enter_own().is_err() {
            // The command fails.
            return Ok(None);
        }
        let header = call.header;
        let client = ClientView { driver: call.driver(), session: &call.session, memory, code };
        let access = self.tracker.access_by_slots(&client, &header, parameters);
        let exported = (header.call == command::MEMORY_EXPORT).then(|| word(parameters, 0)).flatten();
        let plan = borrowing.plan(&self.tracker, memory, &access, exported);
        if plan.places().is_empty() {
            if let Some(graph) = graph {
                borrowing.found_harmless(graph, memory, plan.kernels);
            }
            return Ok(None);
        }
        // Whatever runs may wait for this very command. Where it has only read so far, it need not be watched.
        let is_certain = !plan.written.is_empty() || !plan.unclear.is_empty();
        let has_read = |it: &(KernelId, u32, Place)| borrowing.record.has_read(it.0, it.1);
        let patience = match is_certain {
            true => READERS,
            false if plan.watched.iter().all(has_read) => WATCHED,
            false => UNSEEN,
        };
        match comes_to_rest(call, patience) {
            Ok(true) => {}
            Ok(false) if !is_certain => return Ok(None),
            Ok(false) => {
                plan.written.iter().for_each(|(_, base)| borrowing.record.writes(*base));
                borrowing.give_up(format!(
                    "a command may write memory that the client has borrowed, and work that may read it has not ended for {READERS:?}"
                ));
                return Err(CUDA_ERROR_UNKNOWN);
            }
            // The command meets the same error.
            Err(_) => return Ok(None),
        }
        let done = self.carry_out(layers, plan);
        layers.call.gpu.leave();
        let _ = layers.call.enter_own();
        done
    }

    fn carry_out(&mut self, layers: &mut Layers<'_>, plan: Plan) -> Result<Option<Trial>, CUresult> {
        let Some(borrowing) = &mut self.borrowing else { return Ok(None) };
        let Layers { call, memory, .. } = layers;
        let (driver, mut bytes) = (call.driver(), 0);
        for place in plan.places() {
            if !memory.devices[place.0].memory.is_read_only(place.1) {
                continue;
            }
            match make_own(&mut self.hasher, driver, memory, place) {
                Ok(()) => bytes += unit(memory, place).size(),
                Err(OwnError::NotMade(failed)) => {
                    warn!("no memory for what the client may write: {failed}");
                    return Err(failed.code);
                }
                Err(lost @ OwnError::Lost(_)) => {
                    borrowing.give_up(format!("memory that the client has borrowed is lost: {lost}"));
                    return Err(CUDA_ERROR_UNKNOWN);
                }
            }
        }
        for &(ordinal, base) in plan.written.union(&plan.unclear) {
            memory.devices[ordinal].memory.ends_borrowing(driver, base);
        }
        plan.written.iter().for_each(|(_, base)| borrowing.record.writes(*base));
        debug!(bytes, written = plan.written.len(), watched = plan.watched.len(), "the client has memory of its own");
        borrowing.tell_news();
        let Plan { watched: slots, named, .. } = plan;
        if slots.is_empty() {
            return Ok(None);
        }
        // Without hashes nothing is learned.
        let before = contents(&mut self.hasher, (driver, &call.session), memory, &named).ok();
        Ok(before.map(|before| Trial { slots, named, before }))
    }

    /// Called after a command whose writes are watched has been handed to the driver. `executed`: the driver has taken it.
    pub(crate) fn judge(&mut self, layers: &mut Layers<'_>, trial: Trial, executed: bool) {
        if !executed {
            return;
        }
        let rest = comes_to_rest(layers.call, WATCHED);
        if rest.is_ok() {
            self.compare_trial(layers, trial, rest.is_ok_and(|rest| rest));
            layers.call.gpu.leave();
            let _ = layers.call.enter_own();
        }
    }

    fn compare_trial(&mut self, layers: &mut Layers<'_>, trial: Trial, at_rest: bool) {
        let Some(borrowing) = &mut self.borrowing else { return };
        let Trial { slots, named, before } = trial;
        let Layers { call, memory, .. } = layers;
        let driver = call.driver();
        let after = at_rest.then(|| contents(&mut self.hasher, (driver, &call.session), memory, &named).ok()).flatten();
        let Some(after) = after else {
            // The allocations are not borrowed again, so that nothing of this kind is watched again and again.
            for (_, _, (ordinal, base)) in slots {
                memory.devices[ordinal].memory.ends_borrowing(driver, base);
            }
            return;
        };
        let is_changed = |unit: &Unit| before.get(unit) != after.get(unit);
        let active: BTreeSet<KernelId> = named.iter().filter(|(_, unit)| is_changed(unit)).map(|it| it.0).collect();
        let mut written: BTreeMap<(KernelId, u32), bool> = BTreeMap::new();
        for &(kernel, offset, place) in &slots {
            *written.entry((kernel, offset)).or_default() |= is_changed(&unit(memory, place));
        }
        let mut is_settled = false;
        for ((kernel, offset), written) in written {
            let seen = match written {
                true => Seen::Changed,
                false if active.contains(&kernel) => Seen::Same,
                false => Seen::Nothing,
            };
            borrowing.record.saw(kernel, offset, seen);
            is_settled |= borrowing.record.verdict(kernel, offset) == Verdict::Reads;
        }
        let changed: BTreeSet<Place> =
            slots.iter().map(|it| it.2).filter(|it| is_changed(&unit(memory, *it))).collect();
        for (ordinal, base) in changed {
            memory.devices[ordinal].memory.ends_borrowing(driver, base);
            borrowing.record.writes(base);
        }
        // Earlier launches by the same parameter, too, have left memory of its own behind that nothing needs.
        let verdict = |it: &(KernelId, u32, Place)| borrowing.record.verdict(it.0, it.1);
        let unsettled: BTreeSet<Place> =
            slots.iter().filter(|it| verdict(it) != Verdict::Reads).map(|it| it.2).collect();
        if is_settled {
            for place in all_places(memory).difference(&unsettled) {
                match borrow_again(&mut self.hasher, (driver, &call.session), memory, *place) {
                    Ok(true) => {}
                    Ok(false) => borrowing.record.writes(place.1),
                    Err(failed) => borrowing.give_up(format!("memory that the client has borrowed is lost: {failed}")),
                }
            }
        }
        borrowing.tell_news();
    }

    /// Called when a context of the client is lost. A write to borrowed memory may be the reason.
    pub(crate) fn context_is_lost(&mut self, memory: &Memory, code: CUresult) {
        let borrows = memory.devices.iter().any(|it| it.memory.borrowed_bytes() > 0);
        if let Some(borrowing) = self.borrowing.as_mut().filter(|_| borrows && code == CUDA_ERROR_ILLEGAL_ADDRESS) {
            let names = borrowing.record.fault();
            borrowing.give_up(format!(
                "a kernel has written memory that this process shares with others of its image and was taken to read only, or \
                memory that is not there (error 700). The last ones were {}. They are not trusted any more; restore the image again",
                listed(&names)
            ));
        }
    }
}

/// The bytes of an allocation.
fn unit(memory: &Memory, (ordinal, base): Place) -> Unit {
    let size = memory.devices[ordinal].memory.allocations().get(&base).map_or(0, |it| it.size);
    Unit::new(base, size)
}

/// Gives an allocation memory of its own, while nothing runs.
fn make_own(hasher: &mut Hasher, driver: &Driver, memory: &mut Memory, (ordinal, base): Place) -> Result<(), OwnError> {
    let device = &mut memory.devices[ordinal];
    hasher.prepare(driver, (ordinal, device.device), device.primary).map_err(OwnError::NotMade)?;
    let window = window::clones(ordinal);
    clones::keep_window(driver, window.start, window.end - window.start);
    let missing = CallFailed { call: "a stream for copies", code: CUDA_ERROR_INVALID_HANDLE };
    let stream = hasher.stream(ordinal).ok_or(OwnError::NotMade(missing))?;
    // SAFETY: the context is the driver's own.
    let entered = unsafe { (driver.cuCtxSetCurrent)(device.primary) };
    checked("cuCtxSetCurrent", entered).map_err(OwnError::NotMade)?;
    let mut copy = |from: u64, to: u64, length: u64| {
        // SAFETY: the source is the client's memory, which nothing uses, the target a new piece; the stream is ours.
        unsafe {
            checked("cuMemcpyAsync", (driver.cuMemcpyAsync)(to, from, length as usize, stream))?;
            checked("cuStreamSynchronize", (driver.cuStreamSynchronize)(stream))
        }
    };
    device.memory.make_own(driver, (ordinal, base), &mut copy)
}

/// Borrows an allocation again that has memory of its own, while nothing runs. Content that a kernel has changed which was taken to
/// read only is not the template's: then the allocation keeps its memory. Returns whether it is borrowed.
fn borrow_again(
    hasher: &mut Hasher,
    (driver, session): (&'static Driver, &Session),
    memory: &mut Memory,
    place: Place,
) -> Result<bool, CallFailed> {
    let (ordinal, base) = place;
    let unit = unit(memory, place);
    let device = &mut memory.devices[ordinal];
    if device.memory.is_read_only(base) {
        return Ok(true);
    }
    let on = (ordinal, device.device, device.primary, session.processors(ordinal));
    let own = hash(hasher, driver, on, unit)?;
    let is_same = || hash(hasher, driver, on, unit).is_ok_and(|template| template == own);
    device.memory.borrow_again(driver, base, is_same)
}

/// The content of allocations, while nothing runs.
fn contents(
    hasher: &mut Hasher,
    (driver, session): (&'static Driver, &Session),
    memory: &Memory,
    named: &BTreeSet<(KernelId, Unit)>,
) -> Result<Contents, CallFailed> {
    let mut contents = Contents::new();
    for (_, unit) in named {
        let Some(ordinal) = window::device_of(unit.start).filter(|_| !contents.contains_key(unit)) else { continue };
        let device = &memory.devices[ordinal];
        let on = (ordinal, device.device, device.primary, session.processors(ordinal));
        contents.insert(*unit, hash(hasher, driver, on, *unit)?);
    }
    Ok(contents)
}

/// The hashes of the parts of an allocation.
fn hash(
    hasher: &mut Hasher,
    driver: &Driver,
    on: (usize, CUdevice, CUcontext, u32),
    unit: Unit,
) -> Result<Vec<ContentHash>, CallFailed> {
    let parts = (unit.start..unit.end).step_by(BATCH_BYTES as usize);
    let mut all = Vec::new();
    for start in parts {
        let part = Unit::new(start, BATCH_BYTES.min(unit.end - start));
        // SAFETY: the client's memory is mapped, and the device may read it.
        let hashes = unsafe { hasher.hash(driver, on, &[part]) }?;
        if hashes.is_empty() {
            return Err(CallFailed { call: "hashing memory", code: CUDA_ERROR_INVALID_VALUE });
        }
        all.extend(hashes);
    }
    Ok(all)
}

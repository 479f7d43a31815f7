//! Checks the client's commands before they write memory that is not copied yet.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rekindle_cuda_abi::types::*;
use rekindle_wire::control::Waits;
use rekindle_wire::window;

use super::{Copying, Place, State};
use crate::checkpoint::access::client::ClientView;
use crate::checkpoint::access::hash::Hasher;
use crate::checkpoint::access::set::Set;
use crate::checkpoint::access::tracker::Tracker;
use crate::gpu::driver::{CallFailed, Driver, checked};
use crate::resources::memory::BackgroundCopy;
use crate::resources::units::Unit;
use crate::resources::{Code, Memory};
use crate::session::call::Call;

/// The maximum number of kernels that a message names.
const NAMED: usize = 8;

/// A copy, for which commands are checked.
pub(crate) struct Guard {
    copying: Arc<Copying>,
    pub(in crate::checkpoint) waits: Waits,
    /// Functions that were launched since the ring was opened.
    pub(in crate::checkpoint) ran: HashSet<u64>,
    /// The order in which commands first named each place: 0, 1, ...
    pub(in crate::checkpoint) named: HashMap<Place, u32>,
}

impl Guard {
    pub(crate) fn new(copying: Arc<Copying>) -> Self {
        Self { copying, waits: Waits::default(), ran: HashSet::new(), named: HashMap::new() }
    }

    /// Called before a command goes to the driver, while memory that the command may write is not copied yet.
    pub(crate) fn look_out(
        &mut self,
        tracker: &mut Tracker,
        hasher: &Hasher,
        call: &mut Call,
        memory: &Memory,
        code: &Code,
        parameters: &[u8],
    ) {
        if !self.copying.protects() || call.enter_own().is_err() {
            return;
        }
        let client = ClientView { driver: call.driver(), session: &call.session, memory, code };
        let access = tracker.access(&client, &call.header, parameters);
        self.ran.extend(&access.functions);
        let places = match &access.writes {
            Set::Everything => self.copying.all_places(),
            Set::Units(units) => {
                let places = places_of(memory, &self.copying, units);
                self.note(&places);
                places
            }
        };
        if !places.is_empty() {
            self.hold_back(hasher, call, memory, &places);
            let _ = call.enter_own();
        }
    }

    fn hold_back(&mut self, hasher: &Hasher, call: &mut Call, memory: &Memory, places: &[Place]) {
        let (began, left) = (Instant::now(), self.copying.unsafe_left.load(Ordering::Acquire));
        let copying = Arc::clone(&self.copying);
        let cloned = copying.secure(call.driver(), places, |device| {
            let primary = memory.devices.get(device)?.primary;
            call.gpu.enter(primary).ok()?;
            hasher.stream(device)
        });
        if self.copying.unsafe_left.load(Ordering::Acquire) < left {
            self.waits.commands += 1;
            self.waits.cloned += cloned;
            self.waits.ns += began.elapsed().as_nanos() as u64;
        }
    }

    /// Records that a command is about to write these places.
    fn note(&mut self, places: &[Place]) {
        for place in places {
            let next = self.named.len() as u32;
            self.named.entry(*place).or_insert(next);
        }
    }
}

/// Lists names of kernels for a message.
pub(in crate::checkpoint) fn listed(names: &BTreeSet<String>) -> String {
    let mut list = names.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > NAMED {
        list += &format!(", {} more", names.len() - NAMED);
    }
    list
}

impl Copying {
    /// Whether any memory must stay unchanged.
    fn protects(&self) -> bool {
        self.unsafe_left.load(Ordering::Acquire) > 0
    }

    /// Makes places safe to be written: clones them where there is room, otherwise has them copied next and waits. Returns how
    /// many bytes were cloned.
    ///
    /// `stream` returns a stream of a device, and makes its context current.
    fn secure(&self, driver: &Driver, places: &[Place], mut stream: impl FnMut(usize) -> Option<CUstream>) -> u64 {
        let mut clones: Vec<(usize, u64)> = Vec::new();
        let mut inner = self.lock();
        if inner.failed {
            return 0;
        }
        for place in places {
            let Some(jobs) = inner.places.get(place).copied().filter(|jobs| jobs.unsafe_left > 0) else { continue };
            for index in jobs.first..jobs.end {
                if inner.states[index] != State::Pending {
                    continue;
                }
                let job = self.tasks[index].job;
                match inner.room.as_mut().and_then(|room| room.take(job.device, job.length)) {
                    Some(address) => {
                        inner.states[index] = State::Cloning;
                        clones.push((index, address));
                    }
                    None => inner.urgent.push_back(index),
                }
            }
        }
        let mut cloned = 0;
        if !inner.urgent.is_empty() {
            self.awaited.notify_all();
        }
        if !clones.is_empty() {
            drop(inner);
            let copied = self.clone_all(driver, &clones, &mut stream);
            inner = self.lock();
            for (index, address) in clones {
                let job = self.tasks[index].job;
                if copied.is_ok() {
                    cloned += job.length;
                    self.make_safe(&mut inner, index, State::Cloned(address));
                    inner.clones.push_back(index);
                } else {
                    inner.states[index] = State::Pending;
                    inner.urgent.push_back(index);
                    if let Some(room) = &mut inner.room {
                        room.give(job.device, address, job.length);
                    }
                }
            }
            self.changed.notify_all();
        }
        if !inner.urgent.is_empty() {
            self.awaited.notify_all();
        }
        let is_unsafe =
            |place: &Place, inner: &super::Inner| inner.places.get(place).is_some_and(|p| p.unsafe_left > 0);
        while !inner.failed && !inner.over && places.iter().any(|place| is_unsafe(place, &inner)) {
            inner = self.wait(inner);
        }
        cloned
    }

    /// Copies jobs to their clones, and waits for the copies.
    fn clone_all(
        &self,
        driver: &Driver,
        clones: &[(usize, u64)],
        stream: &mut impl FnMut(usize) -> Option<CUstream>,
    ) -> Result<(), CallFailed> {
        let mut devices: Vec<usize> = clones.iter().map(|(index, _)| self.tasks[*index].job.device).collect();
        devices.sort_unstable();
        devices.dedup();
        for device in devices {
            let no_stream = CallFailed { call: "a stream for clones", code: CUDA_ERROR_INVALID_HANDLE };
            let stream = stream(device).ok_or(no_stream)?;
            let own = clones.iter().filter(|(index, _)| self.tasks[*index].job.device == device);
            let enqueued =
                own.map(|(index, address)| (self.tasks[*index].job, address)).try_for_each(|(job, address)| {
                    // SAFETY: the job's memory is the client's and stays mapped while the job is not safe; the clone's
                    // was taken for this.
                    let copied = unsafe { (driver.cuMemcpyAsync)(*address, job.address, job.length as usize, stream) };
                    checked("cuMemcpyAsync", copied)
                });
            // The copies that were enqueued end also if others could not be enqueued.
            // SAFETY: the stream is ours.
            let done = checked("cuStreamSynchronize", unsafe { (driver.cuStreamSynchronize)(stream) });
            enqueued.and(done)?;
        }
        Ok(())
    }

    /// Finds places that have memory in a range of addresses.
    fn places_in(&self, start: u64, end: u64, found: &mut Vec<Place>) {
        let inner = self.lock();
        let from = inner.allocations.partition_point(|(_, behind)| *behind <= start);
        let within = inner.allocations[from..].iter().take_while(|(address, _)| *address < end);
        found.extend(within.map(|(address, _)| Place::Allocation(*address)));
    }

    fn all_places(&self) -> Vec<Place> {
        self.lock().places.keys().copied().collect()
    }
}

impl BackgroundCopy for Copying {
    fn let_go(&self, start: u64, end: u64) {
        if !self.protects() {
            return;
        }
        let mut inner = self.lock();
        let from = inner.allocations.partition_point(|(_, behind)| *behind <= start);
        let places: Vec<Place> = inner.allocations[from..]
            .iter()
            .take_while(|(address, _)| *address < end)
            .map(|(address, _)| Place::Allocation(*address))
            .collect();
        for place in &places {
            let Some(jobs) = inner.places.get(place).copied() else { continue };
            for index in jobs.first..jobs.end {
                if inner.states[index] != State::Pending {
                    continue;
                }
                if self.leaves_out {
                    self.make_safe(&mut inner, index, State::Gone);
                    self.one_less(&mut inner);
                } else {
                    inner.urgent.push_back(index);
                    self.awaited.notify_all();
                }
            }
        }
        let is_unsafe =
            |place: &Place, inner: &super::Inner| inner.places.get(place).is_some_and(|p| p.unsafe_left > 0);
        // A lane that is reading the place must finish even if the copy has failed.
        let is_read = |place: &Place, inner: &super::Inner| {
            let jobs = inner.places.get(place).copied();
            jobs.is_some_and(|jobs| inner.states[jobs.first..jobs.end].contains(&State::Reading))
        };
        while !inner.over
            && places.iter().any(|place| if inner.failed { is_read(place, &inner) } else { is_unsafe(place, &inner) })
        {
            inner = self.wait(inner);
        }
    }
}

/// The places of these units that a copy protects.
fn places_of(memory: &Memory, copying: &Copying, units: &[Unit]) -> Vec<Place> {
    let mut places = Vec::new();
    for unit in units {
        if window::device_of(unit.start).is_some() {
            copying.places_in(unit.start, unit.end, &mut places);
        } else if window::reserved().contains(&unit.start) {
            places.extend(memory.vmm.pieces_in(unit.start, unit.end).map(Place::Piece));
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use rekindle_wire::command;
    use rekindle_wire::ring::CommandHeader;

    use crate::checkpoint::access::set::{Access, Set};
    use crate::serve::fixture;

    #[test]
    fn a_command_that_waits_for_a_stream_leaves_memory_alone() {
        let mut worker = fixture::executor();
        let header = CommandHeader { call: command::STREAM_SYNC, ..Default::default() };
        assert_eq!(fixture::access_of(&mut worker, header, &[0; 8]), Access::nothing());
        assert_eq!(Access::unknown().writes, Set::Everything);
    }

    #[test]
    fn a_command_that_the_tracker_does_not_understand_may_write_everything() {
        let mut worker = fixture::executor();
        for call in [command::LAUNCH, command::MEM_OPS, command::COPY_BOX, command::LAUNCH_ON_DEVICES] {
            let header = CommandHeader { call, ..Default::default() };
            assert_eq!(fixture::access_of(&mut worker, header, &[7; 12]), Access::unknown(), "{call}");
        }
    }
}

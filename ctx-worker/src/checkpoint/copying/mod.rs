//! Copying a client's memory into an image, most of it while the client runs on already (PhoenixOS, SOSP'25, section 4).
//!
//! ```text
//!   at the quiesce                          ring closed             ring open
//!
//!   closed     ─────────────────────────► lane copies it
//!   cloned     ─copy and hash on device─► ........................ lane copies the clone ─────┐
//!   protected  ─hash on device──────────► ........................ lane copies it ───────────┤
//!                                              │ a command that may write it is about to run │
//!                                              ├─ room for a clone: cloned                   │
//!                                              └─ none: copied next, the command waits       ▼
//!                                                                  host: hash as at the quiesce? ──► data file
//! ```
//!
//! A **job** is a piece of memory of [`rekindle_images::PIECE_LENGTH`] at most. A **place** is the unit in which jobs are
//! protected: an allocation, or a piece of the client's own mappings. Which places a command may write is predicted
//! ([`crate::checkpoint::access`]). So the content decides: all content that reaches the image was hashed, and has the hash
//! that it had at the quiesce. Where the hash differs, a command has made a mispredicted write. Then the copy fails, and the
//! next copy does not rely on predictions for that place.
//!
//! All state is under one lock that is held briefly; lanes ([`crate::checkpoint::engine`]) and the executor meet only here.
//!
//! A **pre-copy** works the same without a quiesce: no memory is protected, lanes copy the current content, and the copy made
//! at the quiesce takes the pieces that still have the same hash. Memory that is freed meanwhile is left out.

pub(crate) mod background;
mod cancel;
pub(in crate::checkpoint) mod clones;
pub(crate) mod error;
pub(crate) mod guard;
pub(crate) mod hashes;
mod precopy;
pub(crate) mod reserving;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rekindle_images::{Piece, PieceHash};

pub(crate) use self::cancel::Cancel;
pub(crate) use self::clones::Clones;
use self::hashes::DeviceHashes;
pub(crate) use self::precopy::Precopied;
use crate::resources::job::{EngineError, Job};

/// How a job's memory is preserved until it is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Preservation {
    /// The ring stays closed until the memory is copied.
    Closed,
    /// A clone at this address preserves the content.
    Cloned(u64),
    /// Commands are checked before they write the memory.
    Protected,
    /// The memory is not preserved: the copy takes its content at the time of the copy.
    None,
    /// Preservation is not needed: the content is stored already.
    AlreadyStored(Piece),
}

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The job's memory must stay unchanged.
    Pending,
    /// The executor is cloning it.
    Cloning,
    /// A clone at this address holds the content.
    Cloned(u64),
    /// A lane is copying the memory out of its own place.
    Reading,
    /// The memory may be written: its content is on the host, or in a clone that a lane is copying.
    Safe,
    /// The content has a place in the image.
    Done,
    /// The memory was freed before a pre-copy reached it.
    Gone,
}

impl State {
    /// Whether the job's memory may be written or taken away.
    fn is_safe(self) -> bool {
        !matches!(self, Self::Pending | Self::Cloning | Self::Reading)
    }
}

/// Memory that is protected as a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Place {
    /// An allocation, by its address.
    Allocation(u64),
    /// A piece of the client's own mapping, by its handle.
    Piece(u64),
    /// Memory that only a closed ring preserves.
    Other,
}

/// A place's jobs, which are consecutive.
#[derive(Clone, Copy, Debug)]
struct Jobs {
    first: usize,
    end: usize,
    /// The number of these jobs that are not safe.
    unsafe_left: usize,
}

/// A job, with how its memory is preserved and expected to change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    pub(crate) job: Job,
    pub(crate) place: Place,
    pub(crate) preservation: Preservation,
    /// Memory that is expected to be written sooner has a lower number.
    pub(crate) soon: u32,
    /// Its hash at the quiesce.
    pub(crate) expected: Option<PieceHash>,
    /// The job's piece from before the quiesce, whose place in the file the content takes.
    pub(crate) before: Option<Piece>,
}

/// A copy that is under way.
pub(crate) struct Copying {
    pub(crate) tasks: Vec<Task>,
    /// Hashes by the device, if nothing writes the memory before it is copied: then nobody hashes the copy.
    pub(crate) hashes: DeviceHashes,
    inner: Mutex<Inner>,
    changed: Condvar,
    /// Signals that a command waits for a job, or that none will any more.
    awaited: Condvar,
    /// The number of jobs that are not safe. At 0, commands skip all checks.
    unsafe_left: AtomicUsize,
    /// Whether the application runs during this copy.
    beside: AtomicBool,
    cancelled: AtomicBool,
    copied: AtomicU64,
    /// The part of these bytes that was not in the file before.
    changed_bytes: AtomicU64,
    /// Bytes of all jobs.
    pub(crate) bytes: u64,
    /// Whether memory that is freed is left out, instead of making the free wait.
    leaves_out: bool,
}

struct Inner {
    states: Vec<State>,
    pieces: Vec<Option<Piece>>,
    places: HashMap<Place, Jobs>,
    /// Places by address, for ranges.
    allocations: Vec<(u64, u64)>,
    /// Jobs that a command waits for.
    urgent: VecDeque<usize>,
    /// Jobs whose clones were made since the copy began.
    clones: VecDeque<usize>,
    /// The order of all other jobs, and how far lanes have advanced in it.
    order: Vec<usize>,
    next: usize,
    /// The number of jobs that are not done.
    left: usize,
    /// Lanes have found no more jobs to take, and there will be none.
    all_taken: bool,
    /// The number of jobs that lanes are reading, out of their own places or out of clones.
    reading: usize,
    /// The number of jobs, at the beginning of the order, that keep the ring closed.
    closed: usize,
    /// The number of these jobs that are not safe.
    closed_left: usize,
    failed: bool,
    /// Places that had changed since the quiesce: nothing more is written, but the remaining places are still checked.
    wrong: BTreeSet<Place>,
    over: bool,
    room: Option<Clones>,
}

impl Inner {
    /// Whether the next job must wait: lanes have taken all jobs that keep the ring closed, and some of these are not read yet.
    fn is_about_to_open(&self) -> bool {
        self.closed_left > 0 && (self.closed..self.order.len()).contains(&self.next) && self.urgent.is_empty()
    }
}

/// A job that a lane is to copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) index: usize,
    /// Where the memory lies.
    pub(crate) job: Job,
    /// Whether the memory is a clone.
    clone: bool,
    /// Whether a command waits for the job.
    pub(crate) urgent: bool,
}

impl Copying {
    /// Begins a copy. `room` is device memory for the clones that exist and for clones made later.
    pub(crate) fn new(tasks: Vec<Task>, room: Option<Clones>, leaves_out: bool) -> Arc<Self> {
        let state = |task: &Task| match task.preservation {
            Preservation::Cloned(address) => State::Cloned(address),
            Preservation::AlreadyStored(_) => State::Done,
            Preservation::Closed | Preservation::Protected | Preservation::None => State::Pending,
        };
        let states: Vec<_> = tasks.iter().map(state).collect();
        let pieces: Vec<_> = tasks
            .iter()
            .map(|task| match task.preservation {
                Preservation::AlreadyStored(piece) => Some(piece),
                _ => None,
            })
            .collect();
        let mut places: HashMap<Place, Jobs> = HashMap::new();
        let mut allocations: Vec<(u64, u64)> = Vec::new();
        for (i, task) in tasks.iter().enumerate().filter(|(_, task)| task.place != Place::Other) {
            let jobs = places.entry(task.place).or_insert(Jobs { first: i, end: i, unsafe_left: 0 });
            jobs.end = i + 1;
            jobs.unsafe_left += usize::from(!states[i].is_safe());
            if let Place::Allocation(address) = task.place {
                let end = task.job.address + task.job.length;
                match allocations.last_mut() {
                    Some(last) if last.0 == address => last.1 = end,
                    _ => allocations.push((address, end)),
                }
            }
        }
        allocations.sort_unstable();
        let there: u64 = tasks.iter().zip(&states).filter(|(_, s)| **s == State::Done).map(|(t, _)| t.job.length).sum();
        // Jobs that keep the ring closed come first, then those that a command may have to wait for; clones can wait.
        let mut order: Vec<usize> = (0..tasks.len()).filter(|i| states[*i] != State::Done).collect();
        order.sort_by_key(|i| match tasks[*i].preservation {
            Preservation::Closed => (0, 0),
            Preservation::Protected | Preservation::None => (1, tasks[*i].soon),
            _ => (2, 0),
        });
        let closed = tasks.iter().filter(|task| task.preservation == Preservation::Closed).count();
        let inner = Inner {
            pieces,
            places,
            allocations,
            urgent: VecDeque::new(),
            clones: VecDeque::new(),
            next: 0,
            left: order.len(),
            all_taken: false,
            reading: 0,
            closed,
            closed_left: closed,
            order,
            failed: false,
            wrong: BTreeSet::new(),
            over: false,
            room,
            states,
        };
        let unsafe_left = inner.states.iter().filter(|state| !state.is_safe()).count();
        Arc::new(Self {
            bytes: tasks.iter().map(|task| task.job.length).sum(),
            tasks,
            hashes: DeviceHashes::default(),
            inner: Mutex::new(inner),
            changed: Condvar::new(),
            awaited: Condvar::new(),
            unsafe_left: AtomicUsize::new(unsafe_left),
            beside: AtomicBool::new(leaves_out),
            cancelled: AtomicBool::new(false),
            copied: AtomicU64::new(there),
            changed_bytes: AtomicU64::new(0),
            leaves_out,
        })
    }

    /// The device is about to hash all jobs, whose memory nothing writes until it is copied.
    pub(crate) fn expect_device_hashes(&self) {
        self.hashes.expect(self.tasks.len());
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, inner: MutexGuard<'a, Inner>) -> MutexGuard<'a, Inner> {
        self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner)
    }

    /// The next job for a lane. Waits while other jobs are being cloned, and while other lanes read the last jobs that keep the
    /// ring closed, so that nothing gets onto the link before those. `None` when no job is left.
    pub(crate) fn take(&self) -> Option<Taken> {
        let mut inner = self.lock();
        loop {
            if inner.failed || inner.left == 0 {
                return None;
            }
            if inner.is_about_to_open() {
                inner = self.wait(inner);
                continue;
            }
            if let Some(taken) = self.take_one(&mut inner) {
                return Some(taken);
            }
            // The remaining jobs are with other lanes, or are being cloned.
            if !inner.states.contains(&State::Cloning) {
                inner.all_taken = true;
                self.awaited.notify_all();
                return None;
            }
            inner = self.wait(inner);
        }
    }

    /// Waits until a command waits for a job. Returns false when none will any more: the pieces that lanes have taken may still
    /// have to be written, also by a lane that rests.
    pub(crate) fn wait_until_awaited(&self) -> bool {
        let mut inner = self.lock();
        while !inner.failed && inner.left > 0 && !inner.all_taken {
            if !inner.urgent.is_empty() {
                return true;
            }
            inner = self.awaited.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        false
    }

    /// Counts a job as done.
    fn one_less(&self, inner: &mut Inner) {
        inner.left -= 1;
        if inner.left == 0 {
            self.awaited.notify_all();
        }
    }

    /// The device of the job that a lane would take now, as far as is known. `None` if there is none.
    pub(crate) fn next_device(&self) -> Option<usize> {
        let inner = self.lock();
        let in_turn = inner.order.get(inner.next..).unwrap_or_default();
        let mut all = inner.urgent.iter().chain(in_turn).chain(&inner.clones);
        let index = *all.find(|index| matches!(inner.states[**index], State::Pending | State::Cloned(_)))?;
        (!inner.failed).then(|| self.tasks[index].job.device)
    }

    fn take_one(&self, inner: &mut Inner) -> Option<Taken> {
        loop {
            let mut urgent = false;
            let crowded = inner.room.as_ref().is_some_and(Clones::is_crowded);
            let index = if let Some(index) = inner.urgent.pop_front() {
                urgent = true;
                index
            } else if crowded && let Some(index) = inner.clones.pop_front() {
                index
            } else if inner.next < inner.order.len() {
                inner.next += 1;
                inner.order[inner.next - 1]
            } else {
                inner.clones.pop_front()?
            };
            let job = self.tasks[index].job;
            match inner.states[index] {
                State::Pending => {
                    inner.states[index] = State::Reading;
                    inner.reading += 1;
                    return Some(Taken { index, job, clone: false, urgent });
                }
                State::Cloned(address) => {
                    inner.states[index] = State::Safe;
                    inner.reading += 1;
                    return Some(Taken { index, job: Job { address, ..job }, clone: true, urgent });
                }
                // The job was taken out of turn.
                _ => {}
            }
        }
    }

    /// Called when a lane has read the job's content to the host.
    pub(crate) fn is_read(&self, taken: &Taken) {
        let mut inner = self.lock();
        inner.reading = inner.reading.saturating_sub(1);
        if taken.clone {
            if let Some(room) = &mut inner.room {
                room.give(taken.job.device, taken.job.address, taken.job.length);
            }
        } else {
            self.make_safe(&mut inner, taken.index, State::Safe);
        }
        drop(inner);
        self.changed.notify_all();
    }

    /// Called when a lane could not copy its job, in a copy that was given up. The lane returns the job.
    pub(crate) fn is_not_read(&self, taken: &Taken) {
        let mut inner = self.lock();
        inner.reading = inner.reading.saturating_sub(1);
        if !taken.clone {
            inner.states[taken.index] = State::Pending;
        }
        drop(inner);
        self.changed.notify_all();
    }

    /// Marks a job's memory as safe to write from here on.
    fn make_safe(&self, inner: &mut Inner, index: usize, state: State) {
        let was_safe = inner.states[index].is_safe();
        inner.states[index] = state;
        if was_safe {
            return;
        }
        if self.tasks[index].preservation == Preservation::Closed {
            inner.closed_left -= 1;
        }
        if let Some(jobs) = inner.places.get_mut(&self.tasks[index].place) {
            jobs.unsafe_left = jobs.unsafe_left.saturating_sub(1);
        }
        let _ = self.unsafe_left.fetch_update(Ordering::Release, Ordering::Relaxed, |left| left.checked_sub(1));
    }

    /// Called when a lane has written the job's content.
    pub(crate) fn is_written(&self, taken: &Taken, piece: Piece) {
        let mut inner = self.lock();
        inner.pieces[taken.index] = Some(piece);
        inner.states[taken.index] = State::Done;
        self.one_less(&mut inner);
        drop(inner);
        self.copied.fetch_add(taken.job.length, Ordering::Relaxed);
        if self.tasks[taken.index].before.is_none_or(|before| before.hash != piece.hash) {
            self.changed_bytes.fetch_add(taken.job.length, Ordering::Relaxed);
        }
        self.changed.notify_all();
    }

    /// Called when a lane reads content that differs from the content at the quiesce. There will be no image; the other places
    /// are still checked, so that the next copy does not fail at another place for the same reason. After a copy was given up,
    /// memory is not preserved any more.
    pub(crate) fn is_wrong(&self, taken: &Taken) {
        let mut inner = self.lock();
        if !inner.failed {
            inner.wrong.insert(self.tasks[taken.index].place);
        }
        drop(inner);
        self.is_passed(taken);
    }

    /// Whether there will be no image because some memory had changed.
    pub(crate) fn is_in_vain(&self) -> bool {
        !self.lock().wrong.is_empty()
    }

    /// All places that had changed.
    pub(crate) fn wrong_places(&self) -> BTreeSet<Place> {
        self.lock().wrong.clone()
    }

    /// The address of the first changed place, and its length: an upper bound of the changed bytes.
    pub(crate) fn wrong(&self) -> Option<(u64, u64)> {
        let first = *self.lock().wrong.first()?;
        let of_it = self.tasks.iter().filter(|task| task.place == first);
        let address = of_it.clone().map(|task| task.job.address).min()?;
        Some((address, of_it.map(|task| task.job.length).sum()))
    }

    /// Called when a lane has checked a job and written nothing.
    pub(crate) fn is_passed(&self, taken: &Taken) {
        let mut inner = self.lock();
        inner.states[taken.index] = State::Done;
        self.one_less(&mut inner);
        drop(inner);
        self.changed.notify_all();
    }

    /// Called when the copy is given up or a lane could not copy its job: no lane takes another job, and nobody waits any more.
    pub(crate) fn fail(&self) {
        self.lock().failed = true;
        self.changed.notify_all();
        self.awaited.notify_all();
    }

    /// Gives the copy up for the requester, who will not ask for its result.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
        self.fail();
    }

    /// Whether nobody will ask for the result.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Whether the copy was given up or has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.lock().failed
    }

    /// The place of each job in the image, once all jobs are done.
    pub(crate) fn pieces(&self) -> Result<Vec<Piece>, EngineError> {
        let inner = self.lock();
        inner.pieces.iter().copied().collect::<Option<_>>().ok_or(EngineError::Cancelled)
    }

    /// The jobs that have a piece, with their pieces.
    pub(crate) fn copied_pieces(&self) -> Vec<(Place, u64, Piece)> {
        let inner = self.lock();
        let pieces = self.tasks.iter().zip(&inner.pieces);
        pieces.filter_map(|(task, piece)| Some((task.place, task.job.offset, (*piece)?))).collect()
    }

    /// Called when no lane is working any more: waits until nothing else uses the client's memory for this copy, or will.
    /// Returns the memory that was reserved for clones.
    pub(crate) fn stop(&self) -> Option<Clones> {
        let mut inner = self.lock();
        inner.failed |= inner.left > 0;
        while inner.states.contains(&State::Cloning) {
            inner = self.wait(inner);
        }
        inner.room.take()
    }

    /// Ends the copy. The caller has called [`Copying::stop`] before, and has released the memory that it returned.
    pub(crate) fn end(&self) {
        self.unsafe_left.store(0, Ordering::Release);
        self.lock().over = true;
        self.changed.notify_all();
    }

    /// Whether the copy has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.lock().over
    }

    /// Waits until the copy has ended, for `patience` at most. Returns whether it has.
    pub(crate) fn wait_until_over_for(&self, patience: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), patience, |inner| !inner.over);
        waited.unwrap_or_else(PoisonError::into_inner).0.over
    }

    /// Waits until the copy has ended or was given up. Returns whether it has ended.
    pub(crate) fn wait_unless_failed(&self) -> bool {
        let mut inner = self.lock();
        while !inner.over && !inner.failed {
            inner = self.wait(inner);
        }
        inner.over
    }

    /// Waits until nothing reads device memory, after the copy was given up: content on the host may still have to be written,
    /// by a disk that hangs.
    pub(crate) fn wait_until_quiet(&self) {
        let mut inner = self.lock();
        while !inner.over && (inner.reading > 0 || inner.states.contains(&State::Cloning)) {
            inner = self.wait(inner);
        }
    }

    /// Whether this copy permits the ring to be opened.
    pub(crate) fn may_open(&self) -> bool {
        self.lock().closed_left == 0
    }

    /// Called when the ring has been opened.
    pub(crate) fn application_runs(&self) {
        self.beside.store(true, Ordering::Relaxed);
    }

    /// Whether the application runs during this copy.
    pub(crate) fn is_beside_it(&self) -> bool {
        self.beside.load(Ordering::Relaxed)
    }

    /// Bytes that were copied and were not in the file before.
    pub(crate) fn changed(&self) -> u64 {
        self.changed_bytes.load(Ordering::Relaxed)
    }

    /// Bytes copied.
    pub(crate) fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    /// Device memory that clones occupy and that counts as available to the client.
    pub(crate) fn reserved(&self, device: usize) -> u64 {
        self.lock().room.as_ref().map_or(0, |room| room.bytes(device))
    }
}

#[cfg(test)]
pub(crate) mod tests;

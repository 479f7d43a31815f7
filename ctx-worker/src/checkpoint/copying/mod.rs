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
//! A **job** is a piece of memory of [`rekindle_images::PIECE_LENGTH`] at most, a **place** what its jobs are protected
//! as: an allocation, or a piece of the client's own mappings. Which places a command may write is speculation
//! ([`crate::checkpoint::access`]), so the content is the judge: what reaches the image was hashed, and has the hash that it had at
//! the quiesce. Where it has not, a command has written what it was not thought to, the copy fails, and that place is
//! not left to speculation the next time.
//!
//! Everything is under one lock that is held for moments; lanes ([`crate::checkpoint::engine`]) and the executor meet only here.
//!
//! A **pre-copy** is the same without a quiesce: nothing is protected, lanes copy what they find, and the copy made at
//! the quiesce takes what still has the hash. Memory that goes away meanwhile is left out.

pub(crate) mod background;
mod cancel;
mod clones;
pub(crate) mod error;
pub(crate) mod guard;
mod precopy;
pub(crate) mod reserving;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rekindle_images::{Piece, PieceHash};

pub(crate) use self::cancel::Cancel;
pub(crate) use self::clones::Clones;
pub(crate) use self::precopy::Precopied;
use crate::resources::job::{EngineError, Job};

/// How a job's memory is kept as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Preservation {
    /// The ring stays closed until it is copied.
    Closed,
    /// As the clone at this address.
    Cloned(u64),
    /// By looking at commands.
    Protected,
    /// Not at all: the copy takes what is there at its time.
    None,
    /// It need not be: its content is stored already.
    AlreadyStored(Piece),
}

/// What has become of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Its memory must stay as it is.
    Pending,
    /// The executor is cloning it.
    Cloning,
    /// A clone at this address has it.
    Cloned(u64),
    /// A lane is copying it out of its own place.
    Reading,
    /// Its memory may be written: it is on the host, or in a clone that a lane is at.
    Safe,
    /// It has a place in the image.
    Done,
    /// Its memory went away before a pre-copy came to it.
    Gone,
}

impl State {
    /// Whether the job's memory may be written or taken away.
    fn is_safe(self) -> bool {
        !matches!(self, Self::Pending | Self::Cloning | Self::Reading)
    }
}

/// What is protected as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Place {
    /// An allocation, by its address.
    Allocation(u64),
    /// A piece of the client's own mapping, by its handle.
    Piece(u64),
    /// Something that only a closed ring keeps as it is.
    Other,
}

/// A place's jobs, which follow each other.
#[derive(Clone, Copy, Debug)]
struct Jobs {
    first: usize,
    end: usize,
    /// As many of them are not safe.
    unsafe_left: usize,
}

/// A job with what becomes of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    pub(crate) job: Job,
    pub(crate) place: Place,
    pub(crate) preservation: Preservation,
    /// What is expected to be written sooner has a lower one.
    pub(crate) soon: u32,
    /// Its hash at the quiesce.
    pub(crate) expected: Option<PieceHash>,
    /// Its piece from before the quiesce, whose place in the file its content takes.
    pub(crate) before: Option<Piece>,
}

/// A copy that is under way.
pub(crate) struct Copying {
    pub(crate) tasks: Vec<Task>,
    inner: Mutex<Inner>,
    changed: Condvar,
    /// Something waits for a job, or nothing will any more.
    awaited: Condvar,
    /// As many jobs are not safe: 0 frees commands from all of this.
    unsafe_left: AtomicUsize,
    /// The application runs beside this.
    beside: AtomicBool,
    cancelled: AtomicBool,
    copied: AtomicU64,
    /// Of those, bytes that were not in the file before.
    changed_bytes: AtomicU64,
    /// Bytes of all jobs.
    pub(crate) bytes: u64,
    /// Whether what goes away is left out, rather than waited for.
    leaves_out: bool,
}

struct Inner {
    states: Vec<State>,
    pieces: Vec<Option<Piece>>,
    places: HashMap<Place, Jobs>,
    /// Places by address, for ranges.
    allocations: Vec<(u64, u64)>,
    /// Jobs that something waits for.
    urgent: VecDeque<usize>,
    /// Jobs whose clones were made since.
    clones: VecDeque<usize>,
    /// The order of all others, and how far lanes are in it.
    order: Vec<usize>,
    next: usize,
    /// As many are not done.
    left: usize,
    /// Lanes have found nothing more to take, and there will not be.
    all_taken: bool,
    /// As many jobs are being read by lanes, out of their own places or out of clones.
    reading: usize,
    /// The first so many of the order keep the ring closed.
    closed: usize,
    /// As many of them are not safe.
    closed_left: usize,
    failed: bool,
    /// Places that were not as they were at the quiesce: nothing more is written, but all are looked at.
    wrong: BTreeSet<Place>,
    over: bool,
    room: Option<Clones>,
}

impl Inner {
    /// Whether what comes next must wait: lanes have taken all that keeps the ring closed, and some of it is not read yet.
    fn is_about_to_open(&self) -> bool {
        self.closed_left > 0 && (self.closed..self.order.len()).contains(&self.next) && self.urgent.is_empty()
    }
}

/// What a lane is to copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) index: usize,
    /// Where it lies.
    pub(crate) job: Job,
    /// Whether that is a clone.
    clone: bool,
    /// A command waits for it.
    pub(crate) urgent: bool,
}

impl Copying {
    /// Begins. `room` is device memory for clones that are made later, with those that were.
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
        // What keeps the ring closed first; then what a command may have to wait for; clones can wait.
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

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, inner: MutexGuard<'a, Inner>) -> MutexGuard<'a, Inner> {
        self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner)
    }

    /// The next job for a lane; waits while others are being cloned, and while the last that keep the ring closed are with
    /// other lanes: nothing gets onto the link before those. None when there is none any more.
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
            // What is left is with other lanes, or is being cloned.
            if !inner.states.contains(&State::Cloning) {
                inner.all_taken = true;
                self.awaited.notify_all();
                return None;
            }
            inner = self.wait(inner);
        }
    }

    /// Waits until something waits for a job. False when nothing will any more: what lanes have taken may yet have to be
    /// written, by one that rests among others.
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

    /// A job has its end.
    fn one_less(&self, inner: &mut Inner) {
        inner.left -= 1;
        if inner.left == 0 {
            self.awaited.notify_all();
        }
    }

    /// The device of what a lane would take now, as far as is known. None where there is nothing.
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
                // It was taken out of turn.
                _ => {}
            }
        }
    }

    /// A lane has the job's content on the host.
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

    /// A lane gives a job back that it could not copy, of a copy that was given up.
    pub(crate) fn is_not_read(&self, taken: &Taken) {
        let mut inner = self.lock();
        inner.reading = inner.reading.saturating_sub(1);
        if !taken.clone {
            inner.states[taken.index] = State::Pending;
        }
        drop(inner);
        self.changed.notify_all();
    }

    /// A job's memory may be written from here on.
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

    /// A lane has written the job's content.
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

    /// A lane has a job's content that is not what it was at the quiesce. There will be no image; the others are looked at
    /// all the same, so that the next one does not meet the same in another place. Of a copy that was given up nobody keeps
    /// the memory as it was.
    pub(crate) fn is_wrong(&self, taken: &Taken) {
        let mut inner = self.lock();
        if !inner.failed {
            inner.wrong.insert(self.tasks[taken.index].place);
        }
        drop(inner);
        self.is_passed(taken);
    }

    /// Whether there will be no image, since something was wrong.
    pub(crate) fn is_in_vain(&self) -> bool {
        !self.lock().wrong.is_empty()
    }

    /// All that was wrong.
    pub(crate) fn wrong_places(&self) -> BTreeSet<Place> {
        self.lock().wrong.clone()
    }

    /// The first bytes that were wrong, and how many at most: of a whole place.
    pub(crate) fn wrong(&self) -> Option<(u64, u64)> {
        let first = *self.lock().wrong.first()?;
        let of_it = self.tasks.iter().filter(|task| task.place == first);
        let address = of_it.clone().map(|task| task.job.address).min()?;
        Some((address, of_it.map(|task| task.job.length).sum()))
    }

    /// A lane has looked at a job, and written nothing.
    pub(crate) fn is_passed(&self, taken: &Taken) {
        let mut inner = self.lock();
        inner.states[taken.index] = State::Done;
        self.one_less(&mut inner);
        drop(inner);
        self.changed.notify_all();
    }

    /// The copy is given up, or a lane could not copy its job: none takes another, and nothing is waited for any more.
    pub(crate) fn fail(&self) {
        self.lock().failed = true;
        self.changed.notify_all();
        self.awaited.notify_all();
    }

    /// It is given up by who asked for it, and who will not ask what came of it.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
        self.fail();
    }

    /// Whether nobody will ask what came of it.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Whether it was given up.
    pub(crate) fn has_failed(&self) -> bool {
        self.lock().failed
    }

    /// Where each job is in the image, once all are.
    pub(crate) fn pieces(&self) -> Result<Vec<Piece>, EngineError> {
        let inner = self.lock();
        inner.pieces.iter().copied().collect::<Option<_>>().ok_or(EngineError::Cancelled)
    }

    /// The jobs that have a piece, and these.
    pub(crate) fn copied_pieces(&self) -> Vec<(Place, u64, Piece)> {
        let inner = self.lock();
        let pieces = self.tasks.iter().zip(&inner.pieces);
        pieces.filter_map(|(task, piece)| Some((task.place, task.job.offset, (*piece)?))).collect()
    }

    /// No lane is at work any more: waits until nobody else uses the client's memory for this copy, or will. Gives back
    /// what was for clones.
    pub(crate) fn stop(&self) -> Option<Clones> {
        let mut inner = self.lock();
        inner.failed |= inner.left > 0;
        while inner.states.contains(&State::Cloning) {
            inner = self.wait(inner);
        }
        inner.room.take()
    }

    /// It is over. [`Copying::stop`] came before, and what it gave has been given back.
    pub(crate) fn end(&self) {
        self.unsafe_left.store(0, Ordering::Release);
        self.lock().over = true;
        self.changed.notify_all();
    }

    /// Whether it has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.lock().over
    }

    /// Waits until it has ended, and no longer than that; whether it has.
    pub(crate) fn wait_until_over_for(&self, patience: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), patience, |inner| !inner.over);
        waited.unwrap_or_else(PoisonError::into_inner).0.over
    }

    /// Waits until it has ended or was given up; whether it has ended.
    pub(crate) fn wait_unless_failed(&self) -> bool {
        let mut inner = self.lock();
        while !inner.over && !inner.failed {
            inner = self.wait(inner);
        }
        inner.over
    }

    /// Waits until nothing reads device memory, of a copy that was given up: what is on the host may yet have to be
    /// written, by a disk that hangs.
    pub(crate) fn wait_until_quiet(&self) {
        let mut inner = self.lock();
        while !inner.over && (inner.reading > 0 || inner.states.contains(&State::Cloning)) {
            inner = self.wait(inner);
        }
    }

    /// Whether the ring may be opened as far as this is concerned.
    pub(crate) fn may_open(&self) -> bool {
        self.lock().closed_left == 0
    }

    /// The ring has been opened.
    pub(crate) fn application_runs(&self) {
        self.beside.store(true, Ordering::Relaxed);
    }

    /// Whether the application runs beside this.
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

    /// Device memory that clones take and that is the client's to have.
    pub(crate) fn reserved(&self, device: usize) -> u64 {
        self.lock().room.as_ref().map_or(0, |room| room.bytes(device))
    }
}

#[cfg(test)]
pub(crate) mod tests;

//! Staging memory: host memory for copies of GPU memory on their way into images. The daemon allocates it and writes to it at
//! its start, since fresh pages are slow, and lends it to workers for dumps (the worker's `engine/stage.rs` uses it).
//!
//! ```text
//!              a dump                  it is over                          the worker says that it has none, or is dead
//!   made ─► fresh ─────► with a worker ──────────► asked back, again and again ──────────────────────────────► made anew
//! ```
//!
//! The daemon lends units, which are memfds of their own. A worker that maps a unit can read it as long as it likes, so no
//! other worker gets the same pages: the daemon frees the pages of a unit that has come back, and new ones take their place.
//! The daemon never frees them earlier: a worker that did not answer, or whose copy hangs in a disk, may still have content
//! there.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rekindle_images::limits::PIECE_LENGTH;
use rekindle_wire::control::WorkerRequest;
use tracing::{debug, info, warn};

use super::worker::{Worker, WorkerError};
use super::{lock, sys, wait};
use crate::limit::Limit;

/// The number of units: as many clients can have some at a time.
const UNITS: u64 = 16;

/// How long a worker may take to unmap its units before it is asked again.
const BACK_TIMEOUT: Limit = Limit::fixed(Duration::from_secs(10));
/// The pause before a worker that has not returned its units is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// The staging memory.
pub(crate) struct Stage {
    /// The size of a unit, in bytes.
    unit: u64,
    units: usize,
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    fresh: Vec<Unit>,
    loans: Vec<Loan>,
    /// Units that came back and are not freed yet.
    old: Vec<Unit>,
    /// The number of the next unit.
    next: u64,
    /// Whether no more units are made, since there is no memory.
    exhausted: bool,
}

#[derive(Debug)]
struct Unit {
    number: u64,
    file: OwnedFd,
}

/// The units that a worker has.
struct Loan {
    worker: Arc<Worker>,
    units: Vec<Unit>,
    /// When to ask for the units, once the dump is over.
    ask_at: Option<Instant>,
}

impl Inner {
    fn existing(&self) -> usize {
        self.fresh.len() + self.loans.iter().map(|it| it.units.len()).sum::<usize>()
    }

    /// A worker that is to be asked for its units now, and the time of the next check.
    fn due(&mut self) -> (Option<Arc<Worker>>, Option<Instant>) {
        let now = Instant::now();
        let loan = self.loans.iter_mut().find(|it| it.ask_at.is_some_and(|at| at <= now));
        let worker = loan.map(|loan| {
            loan.ask_at = Some(now + ASK_AGAIN);
            Arc::clone(&loan.worker)
        });
        (worker, self.loans.iter().filter_map(|it| it.ask_at).min())
    }

    /// A worker has returned all units.
    fn take_back(&mut self, worker: i32) {
        if let Some(at) = self.loans.iter().position(|it| it.worker.pid() == worker) {
            let loan = self.loans.swap_remove(at);
            self.old.extend(loan.units);
            self.exhausted = false;
        }
    }
}

/// The loan to a worker: while this value lives, the worker may use its units.
pub(crate) struct InUse {
    stage: Arc<Stage>,
    worker: i32,
}

impl Stage {
    /// Starts with so many bytes at most, and begins to make them.
    pub(crate) fn start(bytes: u64) -> io::Result<Arc<Self>> {
        let most = sys::available_memory()? / 2;
        if bytes > most {
            warn!(bytes, most, "checkpoint.staging is more than half of the free memory: using half of it");
        }
        let stage = Arc::new(Self::of(bytes.min(most)));
        let maker = Arc::clone(&stage);
        super::thread("stage", move || maker.keep())?;
        Ok(stage)
    }

    fn of(bytes: u64) -> Self {
        let unit = (bytes / UNITS / PIECE_LENGTH).max(1) * PIECE_LENGTH;
        let units = (bytes / unit).min(UNITS) as usize;
        Self { unit, units, inner: Mutex::default(), changed: Condvar::new() }
    }

    /// Asks for unused units, frees those that came back, and makes missing ones.
    fn keep(&self) {
        let began = Instant::now();
        let mut inner = lock(&self.inner);
        let mut whole = false;
        loop {
            let (worker, next) = inner.due();
            if let Some(worker) = worker {
                drop(inner);
                self.ask_back(&worker);
                inner = lock(&self.inner);
            } else if let Some(unit) = inner.old.pop() {
                drop(inner);
                // A worker may have kept the unit mapped, and done nothing with it.
                if let Err(error) = sys::free_pages(unit.file.as_fd(), self.unit) {
                    debug!(%error, "pages of the staging memory stay until no worker maps them");
                }
                drop(unit);
                inner = lock(&self.inner);
            } else if inner.existing() < self.units && !inner.exhausted {
                drop(inner);
                let made = rekindle_ctx_worker::written_memfd(c"rekindle-stage", self.unit);
                inner = lock(&self.inner);
                match made {
                    Ok(file) => {
                        inner.next += 1;
                        let number = inner.next;
                        inner.fresh.push(Unit { number, file });
                    }
                    Err(error) => {
                        inner.exhausted = true;
                        warn!(
                            "host memory suffices for {} of {} units of staging memory: {error}",
                            inner.existing(),
                            self.units
                        );
                    }
                }
            } else {
                if !whole {
                    whole = true;
                    let (bytes, ms) = (inner.existing() as u64 * self.unit, began.elapsed().as_millis() as u64);
                    info!(bytes, ms, "host memory for copies is ready");
                }
                inner = match next {
                    Some(at) => wait_until(&self.changed, inner, at),
                    None => wait(&self.changed, inner),
                };
            }
        }
    }

    /// Asks a worker to unmap its units. A worker that copies, or does not answer, is asked again.
    fn ask_back(&self, worker: &Worker) {
        let request = WorkerRequest::Stage { unit: self.unit, units: Vec::new(), new: Vec::new() };
        match worker.ask(&request, &[], BACK_TIMEOUT) {
            Ok(()) => self.take_back(worker.pid()),
            // It was dead before it got them, and nobody says so any more.
            Err(_) if worker.is_dead() => self.take_back(worker.pid()),
            Err(error) => debug!(worker = worker.pid(), %error, "keeps its part of the stage for now"),
        }
    }

    /// Lends a worker its part, in a dump of so many clients. Nothing where no units are free, or where the worker cannot take
    /// them: the worker then copies without. A worker that does not answer within the limit is an error.
    pub(crate) fn lend(
        self: &Arc<Self>,
        worker: &Arc<Worker>,
        clients: usize,
        limit: Limit,
    ) -> Result<Option<InUse>, WorkerError> {
        let Some((request, files)) = self.choose(worker, clients) else { return Ok(None) };
        // Created whatever the answer is: units that the worker may have must be asked back.
        let in_use = InUse { stage: Arc::clone(self), worker: worker.pid() };
        match worker.ask(&request, &sys::raw(&files), limit) {
            Ok(()) => Ok(Some(in_use)),
            Err(WorkerError::Failed(failure)) => {
                debug!(worker = worker.pid(), %failure, "copies without the stage");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The part for the worker now. Nothing where the worker has not returned its former part.
    fn choose(&self, worker: &Arc<Worker>, clients: usize) -> Option<(WorkerRequest, Vec<OwnedFd>)> {
        let share = (self.units / clients.max(1)).max(1);
        let mut inner = lock(&self.inner);
        if inner.loans.iter().any(|it| it.worker.pid() == worker.pid()) {
            return None;
        }
        let count = share.min(inner.fresh.len());
        let left = inner.fresh.len() - count;
        let units = inner.fresh.split_off(left);
        let files: Option<Vec<_>> = units.iter().map(|it| it.file.try_clone().ok()).collect();
        let Some(files) = files.filter(|_| count > 0) else {
            inner.fresh.extend(units);
            return None;
        };
        let numbers: Vec<_> = units.iter().map(|it| it.number).collect();
        inner.loans.push(Loan { worker: Arc::clone(worker), units, ask_at: None });
        Some((WorkerRequest::Stage { unit: self.unit, units: numbers.clone(), new: numbers }, files))
    }

    /// A worker is gone, or has said that it has no units.
    pub(crate) fn take_back(&self, worker: i32) {
        lock(&self.inner).take_back(worker);
        self.changed.notify_all();
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut inner = lock(&self.stage.inner);
        if let Some(loan) = inner.loans.iter_mut().find(|it| it.worker.pid() == self.worker) {
            loan.ask_at = Some(Instant::now());
        }
        drop(inner);
        self.stage.changed.notify_all();
    }
}

fn wait_until<'a>(changed: &Condvar, inner: MutexGuard<'a, Inner>, at: Instant) -> MutexGuard<'a, Inner> {
    let timeout = at.saturating_duration_since(Instant::now());
    changed.wait_timeout(inner, timeout).unwrap_or_else(PoisonError::into_inner).0
}

#[cfg(test)]
mod tests {
    use rekindle_wire::attach::Attached;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn it_is_cut_into_whole_pieces() {
        let cut = |mib| {
            let stage = Stage::of(mib * MIB);
            (stage.unit / MIB, stage.units)
        };
        assert_eq!([cut(0), cut(3), cut(4), cut(20), cut(64)], [(4, 0), (4, 0), (4, 1), (4, 5), (4, 16)]);
        assert_eq!([cut(256), cut(250)], [(16, 16), (12, 16)]);
    }

    #[test]
    fn a_worker_that_has_died_before_it_gets_its_part_keeps_nothing() {
        let child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = child.id().cast_signed();
        let attached = Attached { driver_version: 0, driver_build: String::new(), api_version: 0, devices: Vec::new() };
        let (channel, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let worker = Worker::new(pid, Some((child, None)), attached, 0, channel).unwrap();
        worker.kill();
        drop(other);
        while !worker.is_dead() {
            std::thread::yield_now();
        }
        let stage = Arc::new(Stage::of(4 * MIB));
        let file = rekindle_ctx_worker::written_memfd(c"unit", 4 * MIB).unwrap();
        lock(&stage.inner).fresh.push(Unit { number: 1, file });
        let lent = stage.lend(&worker, 1, BACK_TIMEOUT);
        assert!(matches!(lent, Err(WorkerError::Dead(_))));
        let (due, _) = lock(&stage.inner).due();
        stage.ask_back(&due.unwrap());
        assert!(lock(&stage.inner).loans.is_empty());
    }

    #[test]
    fn the_pages_of_what_is_taken_back_are_freed_whoever_maps_it() {
        let blocks = |file: &std::fs::File| std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap());
        let file = std::fs::File::from(rekindle_ctx_worker::written_memfd(c"unit", 4 * MIB).unwrap());
        assert_eq!(blocks(&file) * 512, 4 * MIB);
        super::super::memfd::check(&file, "it", 4 * MIB).unwrap();
        sys::free_pages(file.as_fd(), 4 * MIB).unwrap();
        assert_eq!(blocks(&file), 0);
    }
}

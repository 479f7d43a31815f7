//! Host memory for what is copied out of GPUs, on its way into images: made and written to at the daemon's start, since
//! fresh pages are slow, and lent to workers for dumps (`worker::stage` says what for).
//!
//! ```text
//!                    a dump                     another dump wants it, or the worker has died
//!   made ─► fresh ──────────► with a worker ───────────────────────────────────────────────► made anew
//!                              │      ▲
//!                              └──────┘  the worker's next dump
//! ```
//!
//! It is lent in units, which are memfds of their own: a worker that maps one can read it as long as it likes, so what
//! one worker has had no other one gets. The pages of a unit that is taken back are freed whoever still maps it, and new
//! ones take its place. A worker keeps its units between its dumps, since mapping them takes a while too.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rekindle_images::limits::PIECE_LENGTH;
use rekindle_wire::control::WorkerRequest;
use tracing::{debug, info, warn};

use super::worker::Worker;
use super::{lock, sys, wait};

/// How many units it is cut into: as many clients can have some at a time.
const UNITS: u64 = 16;

/// How long a worker may take to map what it is given.
const MAP_TIMEOUT: Duration = Duration::from_secs(60);

/// All of it.
pub(crate) struct Stage {
    /// Bytes of a unit.
    unit: u64,
    units: usize,
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    fresh: Vec<Unit>,
    loans: Vec<Loan>,
    /// Units that were taken back.
    old: Vec<Unit>,
    /// The number of the next one.
    next: u64,
    /// No more are made: there is no memory.
    exhausted: bool,
}

#[derive(Debug)]
struct Unit {
    number: u64,
    file: OwnedFd,
}

/// What a worker has.
struct Loan {
    /// Its pid.
    worker: i32,
    units: Vec<Unit>,
    /// It may be copying.
    used: bool,
}

impl Inner {
    fn existing(&self) -> usize {
        self.fresh.len() + self.loans.iter().map(|it| it.units.len()).sum::<usize>()
    }

    /// So many units are missing: others do not keep theirs, unless they use them now.
    fn want(&mut self, mut missing: usize) {
        for other in self.loans.iter_mut().filter(|it| !it.used) {
            let taken = missing.min(other.units.len());
            self.old.extend(other.units.drain(..taken));
            missing -= taken;
        }
    }

    fn take_back(&mut self, worker: i32) {
        if let Some(at) = self.loans.iter().position(|it| it.worker == worker) {
            let loan = self.loans.swap_remove(at);
            self.old.extend(loan.units);
        }
    }
}

/// While it lives a worker may use what it has.
pub(crate) struct InUse {
    stage: Arc<Stage>,
    worker: i32,
}

impl Stage {
    /// So many bytes at most; begins to make them.
    pub(crate) fn start(bytes: u64) -> io::Result<Arc<Self>> {
        let most = sys::available_memory()? / 2;
        if bytes > most {
            warn!(bytes, most, "checkpoint.staging is more than half of the memory that is free: taking that");
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

    /// Frees what was taken back, and makes what is missing.
    fn keep(&self) {
        let began = Instant::now();
        let mut inner = lock(&self.inner);
        let mut whole = false;
        loop {
            if let Some(unit) = inner.old.pop() {
                drop(inner);
                // A worker may map it for as long as it lives.
                if let Err(error) = sys::free_pages(unit.file.as_fd(), self.unit) {
                    debug!(%error, "pages of the stage stay until nobody maps them");
                }
                drop(unit);
                inner = lock(&self.inner);
            } else if inner.existing() < self.units && !inner.exhausted {
                drop(inner);
                let made = sys::written_memfd(c"rekindle-stage", self.unit);
                inner = lock(&self.inner);
                match made {
                    Ok(file) => {
                        inner.next += 1;
                        let number = inner.next;
                        inner.fresh.push(Unit { number, file });
                        self.changed.notify_all();
                    }
                    Err(error) => {
                        inner.exhausted = true;
                        warn!(
                            "there is host memory for {} of {} units of the stage: {error}",
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
                inner = wait(&self.changed, inner);
            }
        }
    }

    /// Gives a worker its part, in a dump of so many clients. Nothing where there is none, or where the worker does not take
    /// it: it then copies without.
    pub(crate) fn lend(self: &Arc<Self>, worker: &Worker, clients: usize) -> Option<InUse> {
        let (request, files) = self.choose(worker.pid(), clients)?;
        let in_use = InUse { stage: Arc::clone(self), worker: worker.pid() };
        if let Err(error) = worker.ask(&request, &sys::raw(&files), Some(MAP_TIMEOUT)) {
            debug!(worker = worker.pid(), %error, "copies without the stage");
            drop(in_use);
            self.take_back(worker.pid());
            return None;
        }
        Some(in_use)
    }

    /// What the worker is to have now, with what it has not.
    fn choose(&self, worker: i32, clients: usize) -> Option<(WorkerRequest, Vec<OwnedFd>)> {
        if self.units == 0 {
            return None;
        }
        let share = (self.units / clients.max(1)).max(1);
        let mut inner = lock(&self.inner);
        let is_new = !inner.loans.iter().any(|it| it.worker == worker);
        if is_new && inner.fresh.is_empty() {
            // Others have all; for the next dump there is some.
            inner.want(share);
            self.changed.notify_all();
            return None;
        }
        if is_new {
            inner.loans.push(Loan { worker, units: Vec::new(), used: false });
        }
        let Inner { fresh, loans, old, .. } = &mut *inner;
        let loan = loans.iter_mut().find(|it| it.worker == worker)?;
        if loan.used {
            return None;
        }
        loan.used = true;
        let more = share.saturating_sub(loan.units.len()).min(fresh.len());
        if share < loan.units.len() {
            old.extend(loan.units.drain(share..));
        }
        let new = fresh.split_off(fresh.len() - more);
        let numbers = new.iter().map(|it| it.number).collect();
        let files: Option<Vec<_>> = new.iter().map(|it| it.file.try_clone().ok()).collect();
        loan.units.extend(new);
        let units: Vec<_> = loan.units.iter().map(|it| it.number).collect();
        inner.want(share - units.len());
        if files.is_none() {
            inner.take_back(worker);
        }
        self.changed.notify_all();
        let files = files?;
        Some((WorkerRequest::Stage { unit: self.unit, units, new: numbers }, files))
    }

    /// A worker is gone, or did not take what it was given.
    pub(crate) fn take_back(&self, worker: i32) {
        lock(&self.inner).take_back(worker);
        self.changed.notify_all();
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut inner = lock(&self.stage.inner);
        if let Some(loan) = inner.loans.iter_mut().find(|it| it.worker == self.worker) {
            loan.used = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// All units are there, without a thread that makes them.
    fn stage(bytes: u64) -> Stage {
        let stage = Stage::of(bytes);
        stage.make_all();
        stage
    }

    impl Stage {
        fn make_all(&self) {
            let mut inner = lock(&self.inner);
            inner.old.clear();
            while inner.existing() < self.units {
                inner.next += 1;
                let (number, file) = (inner.next, sys::written_memfd(c"unit", self.unit).unwrap());
                inner.fresh.push(Unit { number, file });
            }
        }

        /// How many units a worker has after this, and how many of those are new to it.
        fn give(&self, worker: i32, clients: usize) -> Option<(usize, usize)> {
            let (request, files) = self.choose(worker, clients)?;
            let WorkerRequest::Stage { unit, units, new } = request else { return None };
            assert!(unit == self.unit && new.len() == files.len() && new.iter().all(|it| units.contains(it)));
            Some((units.len(), new.len()))
        }

        fn is_over(&self, worker: i32) {
            lock(&self.inner).loans.iter_mut().filter(|it| it.worker == worker).for_each(|it| it.used = false);
        }
    }

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
    fn clients_of_a_dump_share_it_and_keep_what_they_have() {
        let stage = stage(64 * MIB);
        assert_eq!(stage.give(1, 2), Some((8, 8)));
        assert_eq!(stage.give(2, 2), Some((8, 8)));
        // A worker is copied for one dump at a time.
        assert_eq!(stage.give(1, 1), None);
        stage.is_over(1);
        assert_eq!(stage.give(1, 2), Some((8, 0)));
        // More clients than units: none is left for the last.
        stage.is_over(1);
        stage.is_over(2);
        stage.make_all();
        assert_eq!(stage.give(1, 100), Some((1, 0)));
    }

    #[test]
    fn what_one_worker_has_had_no_other_one_gets() {
        let stage = stage(16 * MIB);
        assert_eq!(stage.give(1, 1), Some((4, 4)));
        let had: Vec<u64> = lock(&stage.inner).loans[0].units.iter().map(|it| it.number).collect();
        assert_eq!(stage.give(2, 1), None);
        stage.is_over(1);
        // It does not use them, so they go; others come in their place.
        assert_eq!(stage.give(2, 1), None);
        assert_eq!(lock(&stage.inner).old.len(), 4);
        stage.make_all();
        assert_eq!(stage.give(2, 1), Some((4, 4)));
        assert!(lock(&stage.inner).loans.iter().flat_map(|it| &it.units).all(|it| !had.contains(&it.number)));
        stage.take_back(2);
        stage.make_all();
        assert_eq!(stage.give(3, 1), Some((4, 4)));
    }

    #[test]
    fn the_pages_of_what_is_taken_back_are_freed_whoever_maps_it() {
        let blocks = |file: &std::fs::File| std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap());
        let file = std::fs::File::from(sys::written_memfd(c"unit", 4 * MIB).unwrap());
        assert_eq!(blocks(&file) * 512, 4 * MIB);
        super::super::memfd::check(&file, "it", 4 * MIB).unwrap();
        sys::free_pages(file.as_fd(), 4 * MIB).unwrap();
        assert_eq!(blocks(&file), 0);
    }
}

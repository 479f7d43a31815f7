//! Restores make the memory of a GPU one after the other.
//!
//! A worker looks whether its GPU has room, says so by its answer to `Load`, and makes the memory while CRIU makes the process. Until it
//! has made all of it, no second restore may be promised the same memory. On an H200 100 GB are made in 10 to 40 ms.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rekindle_images::Client as Record;
use rekindle_wire::control::MEMORY_MADE;

use super::super::grants::Uuid;
use super::super::lock;
use super::super::worker::Worker;

/// The GPUs on which a restore makes memory now.
#[derive(Default)]
pub(in crate::daemon) struct Turns {
    taken: Mutex<BTreeSet<Uuid>>,
    given_back: Condvar,
}

/// A restore's turn on some GPUs. It ends when the worker has made the memory, and with this at the latest.
pub(super) struct Turn {
    turns: Arc<Turns>,
    gpus: Mutex<BTreeSet<Uuid>>,
}

impl Turns {
    /// Waits until no other restore makes memory on these GPUs.
    pub(super) fn take(self: &Arc<Self>, gpus: BTreeSet<Uuid>) -> Turn {
        let mut taken = lock(&self.taken);
        while !taken.is_disjoint(&gpus) {
            taken = self.given_back.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        taken.extend(&gpus);
        Turn { turns: Arc::clone(self), gpus: Mutex::new(gpus) }
    }
}

/// The GPUs on which a worker makes memory for a client.
pub(super) fn gpus_of(record: &Record, worker: &Worker) -> BTreeSet<Uuid> {
    let devices = &worker.attached().devices;
    record.allocations.iter().filter_map(|it| devices.get(it.device as usize)).map(|it| it.uuid).collect()
}

impl Turn {
    /// The worker says how far it is: see `LoadStep`.
    pub(super) fn hears(&self, step: &str) {
        if step == MEMORY_MADE {
            self.end();
        }
    }

    /// All memory is made, or will not be made.
    pub(super) fn end(&self) {
        let gpus = std::mem::take(&mut *lock(&self.gpus));
        if !gpus.is_empty() {
            lock(&self.turns.taken).retain(|it| !gpus.contains(it));
            self.turns.given_back.notify_all();
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn gpus(all: &[u8]) -> BTreeSet<Uuid> {
        all.iter().map(|it| [*it; 16]).collect()
    }

    #[test]
    fn one_at_a_time_has_a_gpu_until_its_memory_is_made() {
        let turns = Arc::<Turns>::default();
        let first = turns.take(gpus(&[1, 2]));
        // Others wait for none.
        drop((turns.take(gpus(&[3])), turns.take(gpus(&[]))));
        let (tell, told) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let second = turns.take(gpus(&[2, 3]));
                tell.send("second").unwrap();
                second
            });
            first.hears("content");
            assert!(told.try_recv().is_err());
            tell.send("first").unwrap();
            first.hears(MEMORY_MADE);
            assert_eq!([told.recv().unwrap(), told.recv().unwrap()], ["first", "second"]);
        });
        let third = turns.take(gpus(&[1, 2, 3]));
        // A turn that has ended takes nothing from the next one.
        drop(first);
        assert!(!lock(&turns.taken).is_disjoint(&gpus(&[1])));
        drop(third);
        assert!(lock(&turns.taken).is_empty());
    }
}

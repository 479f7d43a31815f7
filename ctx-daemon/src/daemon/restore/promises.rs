//! The memory of GPUs that restores are about to make.
//!
//! A worker looks whether its GPU has room, says so by its answer to `Load`, and makes the memory while CRIU makes the process. Until it
//! has made all of it, no other restore may be promised the same memory. So each restore is promised what it makes. Where the GPU has not
//! got room for all that is promised, one restore waits until the others have made theirs: on an H200 100 GB are made in 10 to 40 ms.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rekindle_images::Client as Record;
use rekindle_wire::control::MEMORY_MADE;
use rekindle_wire::nvml::Memory;

use super::super::grants::Uuid;
use super::super::lock;
use super::super::worker::Worker;

/// A restore fits beside others if this part of the GPU's memory is free besides.
const LEFT_FREE: u64 = 64;

/// Bytes by GPU; virtual GPUs of one GPU have one memory.
type Bytes = BTreeMap<Uuid, u64>;

/// What restores are promised now.
#[derive(Default)]
pub(in crate::daemon) struct Promises {
    state: Mutex<State>,
    kept: Condvar,
}

#[derive(Default)]
struct State {
    next: u64,
    /// What is promised, by the numbers of promises.
    promised: BTreeMap<u64, Bytes>,
    /// How many promises were made or kept so far.
    changes: u64,
}

/// A restore's promise. It is kept when the worker has made the memory, and with this at the latest.
pub(in crate::daemon) struct Promise {
    promises: Arc<Promises>,
    number: u64,
}

impl Promises {
    /// Promises a worker the memory of a client. Waits while others are promised memory of the same GPUs that has not room beside it.
    pub(in crate::daemon) fn make(self: &Arc<Self>, record: &Record, worker: &Worker) -> Promise {
        self.make_of(wanted(record, worker), || free(worker))
    }

    /// `free` tells how much memory each GPU has; it is asked only where others are promised some.
    fn make_of(self: &Arc<Self>, wanted: Bytes, free: impl Fn() -> BTreeMap<Uuid, Memory>) -> Promise {
        // What is free, and when.
        let mut seen: Option<(BTreeMap<Uuid, Memory>, u64)> = None;
        let mut state = lock(&self.state);
        loop {
            let others = state.promised_on(&wanted);
            let fits = others.is_empty()
                || seen.as_ref().is_some_and(|(free, when)| *when == state.changes && fits(&wanted, &others, free));
            if fits {
                return self.add(&mut state, wanted);
            }
            let changes = state.changes;
            state = match &seen {
                Some((_, when)) if *when == changes => self.kept.wait(state).unwrap_or_else(PoisonError::into_inner),
                _ => {
                    drop(state);
                    seen = Some((free(), changes));
                    lock(&self.state)
                }
            };
        }
    }

    fn add(self: &Arc<Self>, state: &mut State, wanted: Bytes) -> Promise {
        let number = state.next;
        (state.next, state.changes) = (number + 1, state.changes + 1);
        state.promised.insert(number, wanted);
        Promise { promises: Arc::clone(self), number }
    }
}

impl State {
    /// What others are promised on these GPUs.
    fn promised_on(&self, wanted: &Bytes) -> Bytes {
        let mut sum = Bytes::new();
        for (gpu, bytes) in self.promised.values().flatten().filter(|(gpu, _)| wanted.contains_key(*gpu)) {
            *sum.entry(*gpu).or_default() += bytes;
        }
        sum
    }
}

/// Whether GPUs have room for both.
fn fits(wanted: &Bytes, others: &Bytes, free: &BTreeMap<Uuid, Memory>) -> bool {
    others.iter().all(|(gpu, promised)| {
        let (wanted, memory) = (wanted.get(gpu).copied().unwrap_or(0), free.get(gpu));
        memory.is_some_and(|it| it.free >= promised.saturating_add(wanted).saturating_add(it.total / LEFT_FREE))
    })
}

/// The memory that a worker makes for a client.
fn wanted(record: &Record, worker: &Worker) -> Bytes {
    let devices = &worker.attached().devices;
    let mut sum = Bytes::new();
    for it in &record.allocations {
        if let Some(device) = devices.get(it.device as usize) {
            let bytes = sum.entry(device.part_of.unwrap_or(device.uuid)).or_default();
            *bytes = bytes.saturating_add(it.size);
        }
    }
    sum
}

/// The memory of a worker's GPUs. None for a worker that does not say.
fn free(worker: &Worker) -> BTreeMap<Uuid, Memory> {
    let memory = worker.memory().unwrap_or_default();
    let gpus = worker.attached().devices.iter().map(|it| it.part_of.unwrap_or(it.uuid));
    gpus.zip(memory).collect()
}

impl Promise {
    /// Hears of a worker's load when the memory is made. `forget_load_steps` follows.
    pub(in crate::daemon) fn listen(self: &Arc<Self>, worker: &Worker) {
        let promise = Arc::downgrade(self);
        worker.on_load_step(move |step| {
            if let Some(promise) = promise.upgrade() {
                promise.hears(step);
            }
        });
    }

    /// The worker says how far it is: see `LoadStep`.
    pub(in crate::daemon) fn hears(&self, step: &str) {
        if step == MEMORY_MADE {
            self.is_kept();
        }
    }

    /// All memory is made, or will not be made.
    pub(in crate::daemon) fn is_kept(&self) {
        let mut state = lock(&self.promises.state);
        if state.promised.remove(&self.number).is_some() {
            state.changes += 1;
            self.promises.kept.notify_all();
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.is_kept();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn bytes(of: &[(u8, u64)]) -> Bytes {
        of.iter().map(|(gpu, bytes)| ([*gpu; 16], *bytes)).collect()
    }

    /// A GPU of 640 bytes, of which a few must stay free.
    fn has(free: u64) -> BTreeMap<Uuid, Memory> {
        BTreeMap::from([([1; 16], Memory { total: 640, free, reserved: 0 })])
    }

    #[test]
    fn others_wait_only_where_there_is_no_room_for_both() {
        let promises = Arc::<Promises>::default();
        let never = || unreachable!("nobody else is promised anything");
        let first = promises.make_of(bytes(&[(1, 300), (2, 300)]), never);
        // Of another GPU, or none.
        drop((promises.make_of(bytes(&[(3, 300)]), never), promises.make_of(bytes(&[]), never)));
        // Beside the first.
        drop(promises.make_of(bytes(&[(1, 300)]), || has(610)));
        let (tell, told) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // What the first has made is not free any more.
                let second = promises.make_of(bytes(&[(1, 300)]), || has(609));
                tell.send("second").unwrap();
                second
            });
            first.hears("content");
            assert!(told.try_recv().is_err());
            tell.send("first").unwrap();
            first.hears(MEMORY_MADE);
            assert_eq!([told.recv().unwrap(), told.recv().unwrap()], ["first", "second"]);
        });
        let third = promises.make_of(bytes(&[(1, 300)]), never);
        // A promise that was kept takes nothing from the next one.
        drop(first);
        assert_eq!(lock(&promises.state).promised.len(), 1);
        // A worker that does not say has no room beside others.
        assert!(!fits(&bytes(&[(1, 1)]), &bytes(&[(1, 1)]), &BTreeMap::new()));
        drop(third);
        assert!(lock(&promises.state).promised.is_empty());
    }

    #[test]
    fn what_was_free_before_a_promise_was_kept_is_asked_again() {
        let promises = Arc::<Promises>::default();
        let first = promises.make_of(bytes(&[(1, 100)]), BTreeMap::new);
        let second = Mutex::new(Some(promises.make_of(bytes(&[(1, 100)]), || has(640))));
        let asked = Mutex::new(0);
        let _third = promises.make_of(bytes(&[(1, 400)]), || {
            *lock(&asked) += 1;
            // Meanwhile the second makes its memory.
            has(if lock(&second).take().is_some() { 640 } else { 540 })
        });
        assert_eq!(*lock(&asked), 2);
        drop(first);
    }
}

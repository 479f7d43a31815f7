//! What the daemon knows of the room that it makes: who asks for it, on which GPUs it is at work, and who was suspended for whom.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::victims::Gpu;
use crate::daemon::process::Process;
use crate::daemon::worker::Worker;
use crate::daemon::{lock, wait, wait_timeout};

/// How often a turn that has not come looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(100);
/// How long the log says no more about a worker that finds no room again and again.
const QUIET: Duration = Duration::from_secs(10);

/// Who asks for room, and who was suspended for whom.
#[derive(Default)]
pub(crate) struct Oversubscription {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    /// The workers whose clients find no memory and that nobody has looked after yet, with what must be free on each device.
    wishes: VecDeque<(Arc<Worker>, Wish)>,
    /// The workers that room is being made for, by their pids, with what they have said meanwhile that they need.
    askers: HashMap<i32, Option<Wish>>,
    /// The GPUs on which room is being made.
    taken: Vec<Gpu>,
    /// The clients that the daemon has suspended, by their workers' pids.
    suspended: HashMap<i32, SuspendedFor>,
    /// Workers that serve nobody any more and may still have memory, with their GPUs.
    ending: Vec<(Process, Vec<Gpu>)>,
    /// When the log has last said that there is no room for a worker.
    said: HashMap<i32, Instant>,
}

/// The memory that a worker's client needs.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    /// The bytes that must be free on each device, by the worker's numbers.
    pub(crate) free: Vec<u64>,
    /// Since when the client has waited for them.
    pub(crate) since: Instant,
}

/// For whom a client was suspended.
#[derive(Clone, Debug)]
pub(crate) struct SuspendedFor {
    pub(crate) process: Process,
    pub(crate) command: String,
    /// How long that took.
    pub(crate) took: Duration,
}

impl Oversubscription {
    /// A worker's client finds no memory.
    pub(crate) fn wish(&self, worker: &Arc<Worker>, wish: Wish) {
        lock(&self.inner).wishes.push_back((Arc::clone(worker), wish));
        self.changed.notify_all();
    }

    /// Waits for a worker whose client finds no memory.
    pub(super) fn next_wish(&self) -> (Arc<Worker>, Wish) {
        let mut inner = lock(&self.inner);
        loop {
            match inner.wishes.pop_front() {
                Some(wish) => return wish,
                None => inner = wait(&self.changed, inner),
            }
        }
    }

    /// Begins to make room for a worker. If room is being made for it already, the wish is kept until then.
    pub(super) fn begin(self: &Arc<Self>, worker: i32, wish: &Wish) -> Option<Asking> {
        let mut inner = lock(&self.inner);
        if let Some(meanwhile) = inner.askers.get_mut(&worker) {
            *meanwhile = Some(wish.clone());
            return None;
        }
        inner.askers.insert(worker, None);
        Some(Asking { all: Arc::clone(self), worker, is_over: AtomicBool::new(false) })
    }

    /// Whether room is being made for a worker: its client is in the middle of a command, or is to resume.
    pub(super) fn is_asking(&self, worker: i32) -> bool {
        lock(&self.inner).askers.contains_key(&worker)
    }

    /// Waits until no room is being made on these GPUs for others. `None` if it is not wanted any more.
    pub(super) fn turn(self: &Arc<Self>, gpus: &[Gpu], is_wanted: impl Fn() -> bool) -> Option<Turn> {
        let mut inner = lock(&self.inner);
        while inner.taken.iter().any(|gpu| gpus.contains(gpu)) {
            if !is_wanted() {
                return None;
            }
            inner = wait_timeout(&self.changed, inner, LOOK);
        }
        inner.taken.extend(gpus);
        Some(Turn { all: Arc::clone(self), gpus: gpus.to_vec() })
    }

    /// Notes that a client was suspended for another. `alive` are the pids of all workers.
    pub(super) fn note(&self, worker: i32, whom: SuspendedFor, alive: &[i32]) {
        let mut inner = lock(&self.inner);
        inner.suspended.retain(|it, _| alive.contains(it));
        inner.said.retain(|it, _| alive.contains(it));
        inner.suspended.insert(worker, whom);
    }

    /// For whom the client of a worker was last suspended.
    pub(crate) fn of_worker(&self, worker: i32) -> Option<SuspendedFor> {
        lock(&self.inner).suspended.get(&worker).cloned()
    }

    /// An operator has suspended the client of a worker.
    pub(crate) fn forget(&self, worker: i32) {
        lock(&self.inner).suspended.remove(&worker);
    }

    /// Whether it is news that there is no room for a worker: a suspended client asks again and again.
    pub(super) fn is_news(&self, worker: i32) -> bool {
        let mut inner = lock(&self.inner);
        let is_news = inner.said.get(&worker).is_none_or(|said| said.elapsed() >= QUIET);
        if is_news {
            inner.said.insert(worker, Instant::now());
        }
        is_news
    }

    /// A worker serves nobody any more. Its memory is free when its process has ended.
    pub(crate) fn ends(&self, worker: Process, gpus: Vec<Gpu>) {
        let mut inner = lock(&self.inner);
        inner.ending.retain(|(process, _)| process.is_alive());
        inner.ending.push((worker, gpus));
    }

    /// The workers that may still have memory on one of these GPUs and serve nobody.
    pub(super) fn ending_on(&self, gpus: &[Gpu]) -> Vec<Process> {
        let ending = lock(&self.inner).ending.clone();
        let on_these =
            ending.into_iter().filter(|(process, on)| on.iter().any(|it| gpus.contains(it)) && process.is_alive());
        on_these.map(|(process, _)| process).collect()
    }

    /// Room was made for a worker.
    pub(super) fn made(&self, worker: i32) {
        lock(&self.inner).said.remove(&worker);
    }
}

/// A worker that room is being made for.
pub(super) struct Asking {
    all: Arc<Oversubscription>,
    worker: i32,
    is_over: AtomicBool,
}

impl Asking {
    /// Room was made for a wish, or was not. Returns one for other amounts that the worker has stated meanwhile; without one the
    /// worker asks no more.
    pub(super) fn next(&self, wish: &Wish) -> Option<Wish> {
        let mut inner = lock(&self.all.inner);
        let meanwhile = inner.askers.get_mut(&self.worker).and_then(Option::take);
        let other = meanwhile.filter(|it| it.free != wish.free);
        if other.is_none() {
            inner.askers.remove(&self.worker);
            self.is_over.store(true, Ordering::Relaxed);
        }
        other
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        // After the last `next` the entry is that of another one.
        if !self.is_over.load(Ordering::Relaxed) {
            lock(&self.all.inner).askers.remove(&self.worker);
        }
    }
}

/// GPUs on which nobody else makes room meanwhile.
pub(super) struct Turn {
    all: Arc<Oversubscription>,
    gpus: Vec<Gpu>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        lock(&self.all.inner).taken.retain(|it| !self.gpus.contains(it));
        self.all.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(bytes: u64) -> Wish {
        Wish { free: vec![bytes], since: Instant::now() }
    }

    #[test]
    fn room_is_made_for_one_at_a_time_on_each_gpu() {
        let all = Arc::new(Oversubscription::default());
        let first = all.turn(&[[1; 16], [2; 16]], || true).unwrap();
        assert!(all.turn(&[[2; 16]], || false).is_none());
        let other = all.turn(&[[3; 16]], || false).unwrap();
        drop(first);
        assert!(all.turn(&[[2; 16]], || false).is_some());
        drop(other);
    }

    #[test]
    fn a_worker_asks_once_at_a_time_and_that_there_is_no_room_is_said_once() {
        let all = Arc::new(Oversubscription::default());
        let asking = all.begin(7, &wish(1)).unwrap();
        assert!(all.begin(7, &wish(1)).is_none() && all.is_asking(7) && !all.is_asking(8));
        assert!(all.begin(7, &wish(2)).is_none());
        assert_eq!(asking.next(&wish(1)).map(|it| it.free), Some(vec![2]));
        assert!(all.is_asking(7) && all.begin(7, &wish(2)).is_none());
        assert!(asking.next(&wish(2)).is_none());
        assert!(!all.is_asking(7) && all.begin(7, &wish(2)).is_some());
        assert!(all.is_news(7) && !all.is_news(7) && all.is_news(8));
        all.made(7);
        assert!(all.is_news(7));
    }
}

//! Memory pressure: a client that finds no device memory waits a while for the memory that clones of other clients take, since
//! without Rekindle the client would have had that memory.
//!
//! ```text
//!   its worker ──NeedsRoom──► daemon ──GiveWay──► workers with clones on its devices: what they do not use yet goes back
//!              ◄─Room{coming}─        (the client's command tries again and again)
//!              ◄─Room{not coming}─    once their dumps are over, or at once: it is out of memory
//! ```

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rekindle_wire::control::WorkerRequest;

use super::lock;
use super::worker::Worker;

/// How long the daemon waits before it tells the holders of clones again to give way to the same client.
const AGAIN: Duration = Duration::from_secs(1);

/// The workers that hold clones, and the workers that wait for the memory of these clones.
#[derive(Default)]
pub(crate) struct MemoryPressure(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    next: u64,
    /// Workers that hold memory for clones, by the number of their [`ClonesGuard`].
    holders: Vec<(u64, Arc<Worker>)>,
    /// The workers that wait, with the time when the holders were last told to give way.
    waiting: Vec<(Arc<Worker>, Instant)>,
}

/// Workers may have clones as long as this lives.
pub(crate) struct ClonesGuard {
    memory_pressure: Arc<MemoryPressure>,
    number: u64,
}

impl MemoryPressure {
    /// Notes that these workers are about to set memory aside for clones.
    pub(crate) fn hold(self: &Arc<Self>, workers: impl IntoIterator<Item = Arc<Worker>>) -> ClonesGuard {
        let mut inner = lock(&self.0);
        inner.next += 1;
        let number = inner.next;
        inner.holders.extend(workers.into_iter().map(|worker| (number, worker)));
        ClonesGuard { memory_pressure: Arc::clone(self), number }
    }

    /// A worker's client finds no memory. Tells the worker whether there may be some soon.
    pub(crate) fn needed_by(&self, worker: &Arc<Worker>) {
        let mut inner = lock(&self.0);
        // The worker has given up its own clones before it asks.
        inner.holders.retain(|(_, holder)| !Arc::ptr_eq(holder, worker));
        let mut holders = inner.in_the_way_of(worker);
        let coming = !holders.is_empty();
        let before = inner.waiting.iter().position(|(it, _)| Arc::ptr_eq(it, worker));
        match before.and_then(|at| inner.waiting.get_mut(at)) {
            Some((_, told)) if told.elapsed() < AGAIN => holders.clear(),
            Some((_, told)) => *told = Instant::now(),
            None if coming => inner.waiting.push((Arc::clone(worker), Instant::now())),
            None => {}
        }
        drop(inner);
        for holder in holders {
            holder.say(&WorkerRequest::GiveWay);
        }
        worker.say(&WorkerRequest::Room { coming });
    }
}

impl Inner {
    /// Other workers that have clones on its devices.
    fn in_the_way_of(&self, worker: &Arc<Worker>) -> Vec<Arc<Worker>> {
        let others = self.holders.iter().map(|(_, holder)| holder).filter(|holder| !Arc::ptr_eq(holder, worker));
        others.filter(|holder| have_one_device(holder, worker)).cloned().collect()
    }
}

fn have_one_device(one: &Worker, other: &Worker) -> bool {
    let other = &other.attached().devices;
    one.attached().devices.iter().any(|device| other.iter().any(|it| it.uuid == device.uuid))
}

impl Drop for ClonesGuard {
    fn drop(&mut self) {
        let mut inner = lock(&self.memory_pressure.0);
        inner.holders.retain(|(number, _)| *number != self.number);
        let waiting = std::mem::take(&mut inner.waiting);
        let (still, over): (Vec<_>, Vec<_>) =
            waiting.into_iter().partition(|(worker, _)| !worker.is_dead() && !inner.in_the_way_of(worker).is_empty());
        inner.waiting = still;
        drop(inner);
        for (worker, _) in over {
            worker.say(&WorkerRequest::Room { coming: false });
        }
    }
}

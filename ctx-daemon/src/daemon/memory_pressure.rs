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
    waiting: Vec<Waiting>,
}

/// A worker that waits.
struct Waiting {
    worker: Arc<Worker>,
    /// When the holders were last told to give way.
    told: Instant,
    /// Whether the daemon may make room otherwise when the clones are gone.
    makes_room: bool,
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

    /// A worker's client finds no memory. Tells the worker whether there may be some soon. Where no clones are in its way and
    /// `makes_room` is set, the daemon makes room as soon as the worker has said how much it needs.
    pub(crate) fn needed_by(&self, worker: &Arc<Worker>, makes_room: bool) {
        let mut inner = lock(&self.0);
        // The worker has given up its own clones before it asks.
        inner.holders.retain(|(_, holder)| !Arc::ptr_eq(holder, worker));
        let mut holders = inner.in_the_way_of(worker);
        let coming = !holders.is_empty();
        let before = inner.waiting.iter_mut().find(|it| Arc::ptr_eq(&it.worker, worker));
        match before {
            Some(it) if it.told.elapsed() < AGAIN => holders.clear(),
            Some(it) => it.told = Instant::now(),
            None if coming => {
                inner.waiting.push(Waiting { worker: Arc::clone(worker), told: Instant::now(), makes_room });
            }
            None => {}
        }
        drop(inner);
        for holder in holders {
            holder.say(&WorkerRequest::GiveWay);
        }
        let how_much = !coming && makes_room;
        worker.say(&WorkerRequest::Room { coming: coming || how_much, how_much, again: false });
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
            waiting.into_iter().partition(|it| !it.worker.is_dead() && !inner.in_the_way_of(&it.worker).is_empty());
        inner.waiting = still;
        drop(inner);
        for Waiting { worker, makes_room, .. } in over {
            worker.say(&WorkerRequest::Room { coming: false, how_much: false, again: makes_room });
        }
    }
}

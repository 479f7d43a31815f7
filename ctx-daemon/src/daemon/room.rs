//! Device memory that clones take and others need: a client that finds none waits for it for a while, since without Rekindle
//! it would have had it.
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

/// Who has said so is not told again for one client's sake before this time is over, however often that one asks.
const AGAIN: Duration = Duration::from_secs(1);

/// Who has clones, and who waits for their memory.
#[derive(Default)]
pub(crate) struct Rooms(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    next: u64,
    /// Workers that hold memory for clones, by the number of their [`HoldsRoom`].
    holders: Vec<(u64, Arc<Worker>)>,
    /// With when others were last told to give way.
    waiting: Vec<(Arc<Worker>, Instant)>,
}

/// Workers may have clones as long as this lives.
pub(crate) struct HoldsRoom {
    rooms: Arc<Rooms>,
    number: u64,
}

impl Rooms {
    /// These are about to set memory aside for clones.
    pub(crate) fn hold(self: &Arc<Self>, workers: impl IntoIterator<Item = Arc<Worker>>) -> HoldsRoom {
        let mut inner = lock(&self.0);
        inner.next += 1;
        let number = inner.next;
        inner.holders.extend(workers.into_iter().map(|worker| (number, worker)));
        HoldsRoom { rooms: Arc::clone(self), number }
    }

    /// A worker's client finds no memory. Says to it whether there may be some soon.
    pub(crate) fn needed_by(&self, worker: &Arc<Worker>) {
        let mut inner = lock(&self.0);
        // It has given up its own before it asks.
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
    /// Others that have clones on its devices.
    fn in_the_way_of(&self, worker: &Arc<Worker>) -> Vec<Arc<Worker>> {
        let others = self.holders.iter().map(|(_, holder)| holder).filter(|holder| !Arc::ptr_eq(holder, worker));
        others.filter(|holder| have_one_device(holder, worker)).cloned().collect()
    }
}

fn have_one_device(one: &Worker, other: &Worker) -> bool {
    let other = &other.attached().devices;
    one.attached().devices.iter().any(|device| other.iter().any(|it| it.uuid == device.uuid))
}

impl Drop for HoldsRoom {
    fn drop(&mut self) {
        let mut inner = lock(&self.rooms.0);
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

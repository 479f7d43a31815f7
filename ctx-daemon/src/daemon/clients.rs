//! The registry: processes with a worker, processes about to get one, and process trees that somebody holds.
//!
//! ```text
//!   connected ──► pending ──► client ──► (gone: its worker has died)
//!   (nothing said) (waits for a worker, or until the dump of its tree is over)
//! ```
//!
//! One lock protects all three. A dump first puts a hold on its tree and then looks for clients, so it finds each process
//! either as a client or as pending, and misses none.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rekindle_images::Protocol;
use rekindle_wire::attach::Attach;

use super::grants::Allowed;
use super::process::{self, Process};
use super::worker::{Worker, WorkerError};
use super::{lock, wait_timeout};
use crate::config::Timeouts;

/// How long a process may take to end after it has closed its connection, and the interval at which the daemon checks.
const ENDING: Duration = Duration::from_millis(200);
const ENDING_LOOK: Duration = Duration::from_millis(5);
/// How often whoever needs a loaded client looks whether it is one.
const LOADED_LOOK: Duration = Duration::from_millis(5);
/// How often whoever waits for a tree looks whether it still should.
const HOLD_LOOK: Duration = Duration::from_millis(50);
/// The longest wait for workers whose processes have ended. One that does not end must not hold up restores.
const MEMORY_RETURNS: Duration = Duration::from_secs(2);

/// A process and its worker.
pub(crate) struct Client {
    pub(crate) process: Process,
    /// The message with which the process attached; for a restored process, the message that it would send now.
    pub(crate) attach: Attach,
    /// The GPUs that the process may use.
    pub(crate) allowed: Allowed,
    pub(crate) worker: Arc<Worker>,
    state: AtomicU8,
    protocol: Mutex<Option<Protocol>>,
}

/// The state of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ClientState {
    Running,
    Quiesced,
    Saving,
    /// The client runs, and its worker gives back what it has prepared for a dump that has failed.
    Releasing,
    Restoring,
    /// The client runs, and its commands wait until the content of its memory is loaded.
    Loading,
}

impl ClientState {
    /// All states.
    pub(crate) const ALL: [Self; 6] =
        [Self::Running, Self::Quiesced, Self::Saving, Self::Releasing, Self::Restoring, Self::Loading];

    /// The state's name in listings.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Quiesced => "quiesced",
            Self::Saving => "saving",
            Self::Releasing => "releasing",
            Self::Restoring => "restoring",
            Self::Loading => "loading",
        }
    }
}

impl Client {
    /// Makes a client in this state.
    pub(crate) fn new(
        process: Process,
        attach: Attach,
        allowed: Allowed,
        worker: Arc<Worker>,
        state: ClientState,
    ) -> Arc<Self> {
        let state = AtomicU8::new(state as u8);
        Arc::new(Self { process, attach, allowed, worker, state, protocol: Mutex::default() })
    }

    /// The client's state.
    pub(crate) fn state(&self) -> ClientState {
        let state = usize::from(self.state.load(Ordering::Acquire));
        ClientState::ALL[state.min(ClientState::ALL.len() - 1)]
    }

    /// The protocol that `rekindle protocol` has chosen for the client.
    pub(crate) fn chosen_protocol(&self) -> Option<Protocol> {
        *lock(&self.protocol)
    }

    /// Chooses a protocol, or removes the choice.
    pub(crate) fn choose_protocol(&self, protocol: Option<Protocol>) {
        *lock(&self.protocol) = protocol;
    }

    /// Notes the state; called by the dump or restore that has the client.
    pub(crate) fn set_state(&self, state: ClientState) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// Changes the state of a running client, unless another dump or restore has the client. Returns whether it did.
    pub(crate) fn leave_running(&self, state: ClientState) -> bool {
        let running = ClientState::Running as u8;
        self.state.compare_exchange(running, state as u8, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

impl Client {
    /// The pid of the client's process in its own namespace.
    pub(crate) fn namespace_pid(&self) -> u32 {
        let pids = process::namespace_pids(self.process.pid).unwrap_or_default();
        pids.last().copied().unwrap_or(self.process.pid) as u32
    }

    /// Waits until the content of a restored client's memory is loaded: until then its worker may be busy, and its commands wait, too.
    pub(crate) fn wait_while_it_loads(&self) {
        while self.state() == ClientState::Loading && self.process.is_alive() && !self.worker.is_dead() {
            std::thread::sleep(LOADED_LOOK);
        }
    }

    /// Replaces a worker's error by the end of its process where that is the cause. A worker ends as soon as its process closes
    /// the connection, which may be a little before the process has ended.
    pub(crate) fn explain(&self, error: WorkerError) -> WorkerError {
        let WorkerError::Dead(_) = error else { return error };
        let deadline = Instant::now() + ENDING;
        while self.process.is_alive() {
            if Instant::now() >= deadline {
                return error;
            }
            std::thread::sleep(ENDING_LOOK);
        }
        WorkerError::Ended
    }
}

impl std::fmt::Display for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} ({})", self.process.pid, self.attach.command)
    }
}

/// A process whose handshake has begun.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) process: Process,
    /// The process's attach message; none until the process has sent it.
    pub(crate) attach: Option<Attach>,
    /// Whether a place among the clients is reserved for the process.
    pub(crate) reserved: bool,
    /// The GPUs that the process may use, once they are known.
    pub(crate) allowed: Allowed,
}

/// Who holds a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    Dump,
    /// Its clients give their GPU memory back.
    Suspension,
    /// Another worker takes one of its clients over.
    Move,
}

/// A tree that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) root: i32,
    pub(crate) by: Holder,
}

impl Held {
    /// How long others wait for the tree: what is left of a dump that has ended is over soon, and of one that goes on an operator
    /// knows. The others end by themselves, after as long as it takes to copy memory.
    pub(crate) fn patience(self, timeouts: &Timeouts) -> Duration {
        match self.by {
            Holder::Dump => timeouts.quiesce.time,
            Holder::Suspension | Holder::Move => timeouts.stall.time,
        }
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.by {
            Holder::Dump => "is being dumped",
            Holder::Suspension => "is being suspended",
            Holder::Move => "is being resumed",
        })
    }
}

/// All clients, pending processes and held trees.
#[derive(Default)]
pub(crate) struct Registry {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    clients: Vec<Arc<Client>>,
    pending: HashMap<u64, Pending>,
    /// Places reserved for clients of restores that go on.
    reserved: usize,
    /// The trees that are held.
    holds: HashMap<u64, Held>,
    /// Roots of the trees that somebody waits to hold.
    awaited: HashMap<u64, i32>,
    next: u64,
}

impl Inner {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The number of clients and reserved places. Clients count until their worker has ended, which may take a while after the
    /// process was killed.
    fn taken(&self) -> usize {
        let clients = self.clients.iter().filter(|it| it.process.is_alive()).count();
        clients + self.reserved + self.pending.values().filter(|it| it.reserved).count()
    }
}

impl Registry {
    /// All clients.
    pub(crate) fn clients(&self) -> Vec<Arc<Client>> {
        lock(&self.inner).clients.clone()
    }

    /// The number of clients.
    pub(crate) fn used(&self) -> usize {
        lock(&self.inner).clients.len()
    }

    /// Waits until no process that has ended still has a worker, which has the process's GPU memory; for two seconds at most. Without
    /// Rekindle a process that is gone has no memory, so whoever kills one and restores it relies on that.
    pub(crate) fn wait_for_memory_of_ended(&self) {
        let began = Instant::now();
        let ended = || self.clients().iter().any(|it| !it.process.is_alive());
        while ended() && began.elapsed() < MEMORY_RETURNS {
            std::thread::sleep(ENDING_LOOK);
        }
    }

    /// The clients with these pids. Clients that have ended are left out: a restored process has the pid of one whose worker
    /// may still be ending.
    pub(crate) fn clients_among(&self, pids: &[i32]) -> Vec<Arc<Client>> {
        let mut clients = self.clients();
        clients.retain(|it| pids.contains(&it.process.pid) && it.process.is_alive());
        clients
    }

    /// The processes with these pids whose handshake has begun.
    pub(crate) fn pending_among(&self, pids: &[i32]) -> Vec<Pending> {
        let inner = lock(&self.inner);
        let found = inner.pending.values();
        found.filter(|it| pids.contains(&it.process.pid) && it.process.is_alive()).cloned().collect()
    }

    /// Adds a process that has connected; it is removed when the result is dropped.
    pub(crate) fn connected(self: &Arc<Self>, process: Process) -> PendingGuard {
        let mut inner = lock(&self.inner);
        let number = inner.number();
        inner.pending.insert(number, Pending { process, attach: None, reserved: false, allowed: Allowed::default() });
        PendingGuard { registry: Arc::clone(self), number }
    }

    /// Reserves places for all clients that a restore brings back, or for none: `max` is the most clients there may be. An
    /// error is the number of clients that there are.
    pub(crate) fn reserve(self: &Arc<Self>, needed: usize, max: usize) -> Result<Reservation, usize> {
        let mut inner = lock(&self.inner);
        let taken = inner.taken();
        if needed > max.saturating_sub(taken) {
            return Err(taken);
        }
        inner.reserved += needed;
        Ok(Reservation { registry: Arc::clone(self), left: AtomicUsize::new(needed) })
    }

    /// Adds a client, whatever is being dumped.
    pub(crate) fn add(&self, client: Arc<Client>) {
        add(&mut lock(&self.inner), client);
    }

    /// Puts a client, which another worker is about to take over, into its former self's place. `false`: that is not there any
    /// more.
    pub(crate) fn replace(&self, old: &Arc<Client>, new: &Arc<Client>) -> bool {
        let mut inner = lock(&self.inner);
        let place = inner.clients.iter_mut().find(|it| Arc::ptr_eq(it, old));
        place.map(|it| *it = Arc::clone(new)).is_some()
    }

    /// Removes the client of a worker, and returns it.
    pub(crate) fn remove(&self, worker: i32) -> Option<Arc<Client>> {
        let mut inner = lock(&self.inner);
        let at = inner.clients.iter().position(|it| it.worker.pid() == worker)?;
        Some(inner.clients.swap_remove(at))
    }

    /// The client that has this worker.
    pub(crate) fn of_worker(&self, worker: i32) -> Option<Arc<Client>> {
        lock(&self.inner).clients.iter().find(|it| it.worker.pid() == worker).cloned()
    }

    /// Holds the tree: until the result is dropped no process of it becomes a client, and nobody else holds a tree that has a
    /// process in common with it. Waits as long as one is held, `waits` says so to who holds it and how long this has waited. An
    /// error is who holds it.
    pub(crate) fn hold(
        self: &Arc<Self>,
        root: i32,
        by: Holder,
        waits: impl Fn(Held, Duration) -> bool,
    ) -> Result<HoldGuard, Held> {
        let began = Instant::now();
        let above = process::ancestry(root);
        let mut inner = lock(&self.inner);
        loop {
            let overlaps = |other: &&Held| overlap(root, &above, other.root);
            let Some(other) = inner.holds.values().find(overlaps).copied() else {
                let number = inner.number();
                inner.holds.insert(number, Held { root, by });
                return Ok(HoldGuard { registry: Arc::clone(self), number });
            };
            if !waits(other, began.elapsed()) {
                return Err(other);
            }
            let number = inner.number();
            inner.awaited.insert(number, root);
            inner = wait_timeout(&self.changed, inner, HOLD_LOOK);
            inner.awaited.remove(&number);
        }
    }

    /// Whether somebody waits to hold a tree that has a process in common with this one.
    pub(crate) fn is_awaited(&self, root: i32) -> bool {
        let awaited: Vec<i32> = lock(&self.inner).awaited.values().copied().collect();
        let above = if awaited.is_empty() { Vec::new() } else { process::ancestry(root) };
        awaited.into_iter().any(|other| overlap(root, &above, other))
    }

    /// Whether one of these processes is the root of a tree that is held.
    pub(crate) fn is_held(&self, ancestry: &[i32]) -> bool {
        is_held(&lock(&self.inner), ancestry)
    }

    /// Waits until a hold ends, at most for this time. Returns whether there was one.
    pub(crate) fn wait(&self, time: Duration) -> bool {
        let inner = lock(&self.inner);
        let is_held = !inner.holds.is_empty();
        if is_held {
            drop(wait_timeout(&self.changed, inner, time));
        }
        is_held
    }
}

/// Whether two trees have a process in common. `above` is the first root and all processes above it.
fn overlap(root: i32, above: &[i32], other: i32) -> bool {
    above.contains(&other) || process::ancestry(other).contains(&root)
}

fn is_held(inner: &Inner, ancestry: &[i32]) -> bool {
    inner.holds.values().any(|held| ancestry.contains(&held.root))
}

/// Adds a client in place of a former one of the same process. A process has one worker: a process that attaches again has
/// executed another program, and its old worker is about to end; or it has not, and must not have more workers than others.
fn add(inner: &mut Inner, client: Arc<Client>) {
    for old in inner.clients.extract_if(.., |it| it.process == client.process) {
        old.worker.kill();
    }
    inner.clients.push(client);
}

/// A process in the registry that is not yet a client.
pub(crate) struct PendingGuard {
    registry: Arc<Registry>,
    number: u64,
}

impl PendingGuard {
    /// The process has asked to attach.
    pub(crate) fn asks(&self, attach: &Attach) {
        if let Some(pending) = lock(&self.registry.inner).pending.get_mut(&self.number) {
            pending.attach = Some(attach.clone());
        }
    }

    /// Reserves a place for the process among the clients, of which there may be `max`; `false` if there is no place.
    pub(crate) fn reserve(&self, max: usize) -> bool {
        let mut inner = lock(&self.registry.inner);
        let taken = inner.taken();
        match inner.pending.get_mut(&self.number) {
            Some(pending) if taken < max => {
                pending.reserved = true;
                true
            }
            _ => false,
        }
    }

    /// Reserves a place for the process among the clients of its container. An error is the number of clients that there are
    /// and that there may be.
    pub(crate) fn reserve_in(&self, allowed: &Allowed) -> Result<(), (usize, u32)> {
        let mut inner = lock(&self.registry.inner);
        if let Some(max) = allowed.limits().workers {
            // A process that has executed another program, or has ended, is about to lose its worker.
            let own = inner.pending.get(&self.number).map(|it| it.process);
            let stays = |it: &&Arc<Client>| Some(it.process) != own && it.process.is_alive();
            let clients = inner.clients.iter().filter(|it| it.allowed.is_with(allowed)).filter(stays).count();
            let taken = clients + inner.pending.values().filter(|it| it.allowed.is_with(allowed)).count();
            if taken >= usize::try_from(max).unwrap_or(usize::MAX) {
                return Err((taken, max));
            }
        }
        if let Some(pending) = inner.pending.get_mut(&self.number) {
            pending.allowed = allowed.clone();
        }
        Ok(())
    }

    /// The process becomes a client, unless its tree is being dumped. `ancestry` is the process and all above it.
    pub(crate) fn admit(&self, client: &Arc<Client>, ancestry: &[i32]) -> bool {
        let mut inner = lock(&self.registry.inner);
        if is_held(&inner, ancestry) {
            return false;
        }
        inner.pending.remove(&self.number);
        add(&mut inner, Arc::clone(client));
        true
    }
}

impl Drop for PendingGuard {
    fn drop(&mut self) {
        lock(&self.registry.inner).pending.remove(&self.number);
    }
}

/// Places reserved for the clients of a restore while it goes on.
pub(crate) struct Reservation {
    registry: Arc<Registry>,
    /// The places left; changed under the registry's lock.
    left: AtomicUsize,
}

impl Reservation {
    /// Adds a client that has come back, whatever is being dumped.
    pub(crate) fn fill(&self, client: Arc<Client>) {
        let mut inner = lock(&self.registry.inner);
        if self.left.load(Ordering::Relaxed) > 0 {
            self.left.fetch_sub(1, Ordering::Relaxed);
            inner.reserved -= 1;
        }
        add(&mut inner, client);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        lock(&self.registry.inner).reserved -= self.left.load(Ordering::Relaxed);
    }
}

/// A hold on a tree.
pub(crate) struct HoldGuard {
    registry: Arc<Registry>,
    number: u64,
}

impl Drop for HoldGuard {
    fn drop(&mut self) {
        lock(&self.registry.inner).holds.remove(&self.number);
        self.registry.changed.notify_all();
    }
}

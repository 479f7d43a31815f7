//! The state of a restore: what of each client is there, put together from the session and from the connections that
//! the restored processes make.
//!
//! ```text
//!   per client:   worker ── loads ──► loaded ──┐
//!                 Reattach ──────► connection ─┼─► Connect ─► connected ──(all)──► open
//!                 Resume(pid) ───────► memory ─┘
//! ```

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};

use rekindle_images::{Client as Record, Image};
use rekindle_wire::Dialect;
use rekindle_wire::attach::{Attach, Pinned};
use rekindle_wire::control::{Failure, RestoredSocket, WorkerRequest};
use rekindle_wire::frame::MAX_FDS;
use tracing::{debug, info, warn};

use super::super::clients::{Client, ClientState, Seats};
use super::super::grants::Uuid;
use super::super::process::{self, Process};
use super::super::worker::{Patience, Worker, WorkerError};
use super::super::{Daemon, attach, lock, sys, wait, wait_timeout};
use super::made::{Made, Maker};
use super::shared::{self, SharedMemory};
use super::{RestoreError, check};
use crate::limit::{Deadline, Limit};

/// Of so many restores that were given up it is known what became of them.
const GIVEN_UP: usize = 16;

/// The restores.
#[derive(Default)]
pub(in crate::daemon) struct Restores(Mutex<Known>);

#[derive(Default)]
struct Known {
    going_on: HashMap<u64, Arc<Restore>>,
    given_up: VecDeque<(u64, Arc<Made>)>,
}

impl Restores {
    pub(super) fn add(&self, restore: &Arc<Restore>) {
        lock(&self.0).going_on.insert(restore.id, Arc::clone(restore));
    }

    pub(super) fn remove(&self, restore: &Restore) {
        let mut known = lock(&self.0);
        known.going_on.remove(&restore.id);
        if !restore.is_open() {
            known.given_up.push_back((restore.id, Arc::clone(restore.maker.made())));
            let too_many = known.given_up.len().saturating_sub(GIVEN_UP);
            known.given_up.drain(..too_many);
        }
    }

    /// A restored process has connected. If it is not awaited, its connection closes, and if that is because its restore
    /// was given up, it is killed.
    pub(in crate::daemon) fn reattach(
        &self,
        restore: u64,
        socket: u32,
        cookie: u64,
        process: Process,
        stream: UnixStream,
    ) {
        let (going_on, given_up) = {
            let known = lock(&self.0);
            let given_up = known.given_up.iter().find(|it| it.0 == restore).map(|it| Arc::clone(&it.1));
            (known.going_on.get(&restore).cloned(), given_up)
        };
        if let Some(restore) = going_on {
            return restore.reattach(socket, cookie, process, stream);
        }
        warn!(pid = process.pid, "its restore is over: closing its connection");
        if let Some(made) = given_up {
            made.note(process);
            made.kill();
        }
    }
}

/// A restore.
pub(super) struct Restore {
    /// Cannot be guessed, so that no other process takes a client's place.
    id: u64,
    clients: Vec<Restored>,
    /// Sockets of processes that were in the middle of their handshake.
    unattached: Vec<RestoredSocket>,
    maker: Arc<Maker>,
    seats: Seats,
    state: Mutex<State>,
    changed: Condvar,
}

/// A client that comes back.
struct Restored {
    record: Record,
    name: String,
    worker: Arc<Worker>,
}

#[derive(Default)]
struct State {
    connections: HashMap<usize, Reattached>,
    loaded: HashMap<usize, Result<(), WorkerError>>,
    connected: HashMap<usize, Arc<Client>>,
    open: bool,
}

struct Reattached {
    process: Process,
    cookie: u64,
    stream: UnixStream,
}

impl Restore {
    /// A restore with a worker for each client that needs one.
    pub(super) fn new(id: u64, image: &Image, workers: Vec<Arc<Worker>>, maker: Maker, seats: Seats) -> Self {
        let clients = check::attached(image).zip(workers);
        let attached: HashSet<u32> = check::attached(image).map(|it| it.index).collect();
        let all = image.manifest().clients.iter();
        let unattached = all.filter(|it| !attached.contains(&it.index));
        Self {
            id,
            unattached: unattached.flat_map(sockets_of).collect(),
            clients: clients
                .map(|(record, worker)| Restored { name: check::name(record), record: record.clone(), worker })
                .collect(),
            maker: Arc::new(maker),
            seats,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// The workers, in the order of the clients.
    pub(super) fn workers(&self) -> impl Iterator<Item = &Arc<Worker>> {
        self.clients.iter().map(|it| &it.worker)
    }

    /// The sockets to connect anew.
    pub(super) fn sockets(&self) -> Vec<RestoredSocket> {
        let of_clients = self.clients.iter().flat_map(|it| sockets_of(&it.record));
        of_clients.chain(self.unattached.iter().cloned()).collect()
    }

    /// The CRIU that makes the processes.
    pub(super) fn maker(&self) -> &Arc<Maker> {
        &self.maker
    }

    /// A client that has connected and died before it was complete.
    pub(super) fn has_lost(&self) -> Option<String> {
        let state = lock(&self.state);
        let mut connections = state.connections.iter();
        let lost = connections.find(|it| !it.1.process.is_alive());
        lost.map(|(place, _)| self.clients[*place].name.clone())
    }

    /// Whether clients are to come back, and none has connected.
    pub(super) fn is_nobody_there(&self) -> bool {
        let state = lock(&self.state);
        !self.clients.is_empty() && state.connections.is_empty() && state.connected.is_empty()
    }

    /// A worker is through with loading.
    pub(super) fn loaded(&self, place: usize, result: Result<(), WorkerError>) {
        lock(&self.state).loaded.insert(place, result);
        self.changed.notify_all();
    }

    fn reattach(&self, socket: u32, cookie: u64, process: Process, stream: UnixStream) {
        if self.unattached.iter().any(|it| it.id == socket) {
            self.maker.made().note(process);
            debug!(pid = process.pid, "it will begin its handshake again");
            return;
        }
        let mut clients = self.clients.iter();
        let Some(place) = clients.position(|it| it.record.socket_ids.contains(&socket)) else {
            return warn!(pid = process.pid, socket, "no such socket in its restore");
        };
        self.maker.made().note(process);
        let mut state = lock(&self.state);
        // The first counts: whoever comes with the same number later has no business here.
        state.connections.entry(place).or_insert(Reattached { process, cookie, stream });
        drop(state);
        self.changed.notify_all();
    }

    /// A process is complete. Whether it is one of the clients; if so, it is connected to its worker now.
    pub(super) fn resume(&self, daemon: &Arc<Daemon>, pid: i32) -> Result<bool, RestoreError> {
        let process = Process::with_pid(pid)?;
        // Its connection may still be on its way from the listener to here.
        let Some(place) = self.place_of(process, daemon.config.quiesce_timeout.begins())? else {
            return Ok(false);
        };
        let restored = &self.clients[place];
        let has_ring = shared::has_ring(pid);
        if !has_ring.map_err(|source| RestoreError::Shared { pid, source })? {
            return Err(RestoreError::NoMemory(restored.name.clone()));
        }
        let pinned = restored.record.pinned.iter();
        // With pieces its content would be ours to bring back, and it is no memfd of the process.
        let pinned = pinned.filter(|it| it.pieces.is_empty());
        let pinned: Vec<_> = pinned.map(|it| (it.address, it.size)).collect();
        let memory = shared::take(pid, &pinned);
        let memory = memory.map_err(|source| RestoreError::Shared { pid, source })?;
        self.wait_until_loaded(place)?;
        self.connect(daemon, place, process, memory)?;
        Ok(true)
    }

    /// Which client a process is, when its connection is here.
    fn place_of(&self, process: Process, deadline: Deadline) -> Result<Option<usize>, RestoreError> {
        let pids = process::namespace_pids(process.pid)?;
        let inner = pids.last().copied().unwrap_or(process.pid).unsigned_abs();
        let mut state = lock(&self.state);
        loop {
            let here = |place: &usize| state.connections.get(place).map(|it| it.process);
            let waiting = |place: &usize| !state.connected.contains_key(place);
            let mut places = (0..self.clients.len()).filter(waiting);
            if let Some(place) = places.find(|place| here(place) == Some(process)) {
                return Ok(Some(place));
            }
            // Its pid in its own namespace is what it was. CRIU may have had another process of the tree make the
            // connection, where both held the socket.
            let same: Vec<_> = (0..self.clients.len())
                .filter(waiting)
                .filter(|place| self.clients[*place].record.namespace_pid == inner)
                .collect();
            if same.is_empty() {
                return Ok(None);
            }
            if same.iter().all(|place| here(place).is_some()) {
                return match (same.as_slice(), shared::has_ring(process.pid)) {
                    // One of another pid namespace that happens to have the same number.
                    (_, Ok(false)) => Ok(None),
                    (_, Err(source)) => {
                        let pid = process.pid;
                        Err(RestoreError::Shared { pid, source })
                    }
                    ([place], Ok(true)) => Ok(Some(*place)),
                    ([place, ..], Ok(true)) => Err(RestoreError::Ambiguous(self.clients[*place].name.clone())),
                    ([], Ok(true)) => Ok(None),
                };
            }
            if deadline.is_over() {
                let missing = same.into_iter().find(|place| here(place).is_none());
                let missing = missing.unwrap_or_default();
                return Err(RestoreError::NoConnection(self.clients[missing].name.clone()));
            }
            state = wait_timeout(&self.changed, state, deadline.left());
        }
    }

    fn wait_until_loaded(&self, place: usize) -> Result<(), RestoreError> {
        let mut state = lock(&self.state);
        loop {
            // Any client's failure is the restore's.
            for (place, result) in &state.loaded {
                if let Err(error) = result {
                    return Err(self.failure(*place, error.clone()));
                }
            }
            if state.loaded.contains_key(&place) {
                return Ok(());
            }
            state = wait(&self.changed, state);
        }
    }

    fn connect(
        &self,
        daemon: &Arc<Daemon>,
        place: usize,
        process: Process,
        memory: SharedMemory,
    ) -> Result<(), RestoreError> {
        let restored = &self.clients[place];
        let Some(reattached) = lock(&self.state).connections.remove(&place) else {
            return Err(RestoreError::NoConnection(restored.name.clone()));
        };
        let sees: Vec<Uuid> = restored.worker.attached().devices.iter().map(|it| it.uuid).collect();
        let allowed = daemon.grants.of_restored(process, restored.record.grant.as_ref(), &sees)?;
        if let Some(may) = allowed.gpus()
            && !sees.iter().all(|it| may.contains(it))
        {
            return Err(RestoreError::OtherGpus(restored.name.clone()));
        }
        let client = Client::new(
            process,
            attach_of(&restored.record, reattached.cookie),
            allowed,
            Arc::clone(&restored.worker),
            ClientState::Restoring,
        );
        lock(&self.state).connected.insert(place, Arc::clone(&client));
        self.seats.fill(Arc::clone(&client));
        attach::forget_when_dead(daemon, &client);
        daemon.share(&client)?;
        daemon.records.keep(restored.worker.process(), process, reattached.stream.as_fd());
        let limit = daemon.config.stall_timeout;
        send_memory(&restored.worker, reattached.stream, memory, limit).map_err(|error| self.failure(place, error))
    }

    /// Opens all rings if every client is connected. Each worker answers within the limit.
    pub(super) fn open_if_whole(&self, limit: Limit) -> Result<bool, RestoreError> {
        let clients: Vec<_> = {
            let state = lock(&self.state);
            if state.connected.len() < self.clients.len() {
                return Ok(false);
            }
            state.connected.iter().map(|it| (*it.0, Arc::clone(it.1))).collect()
        };
        let opened: Vec<_> = std::thread::scope(|scope| {
            let open = |client: &Arc<Client>| {
                let request = WorkerRequest::Open;
                let result = client.worker.ask(&request, &[], limit);
                if result.is_ok() {
                    client.set_state(ClientState::Running);
                }
                result
            };
            let asked: Vec<_> =
                clients.iter().map(|(place, client)| (*place, scope.spawn(move || open(client)))).collect();
            let joined = asked.into_iter();
            joined.map(|(place, it)| (place, it.join())).collect()
        });
        for (place, result) in opened {
            let gone = || WorkerError::Failed(Failure::internal("a thread of the daemon's is gone"));
            let result = result.unwrap_or_else(|_| Err(gone()));
            result.map_err(|error| self.failure(place, error))?;
        }
        lock(&self.state).open = true;
        info!(clients = clients.len(), "restored");
        Ok(true)
    }

    fn is_open(&self) -> bool {
        lock(&self.state).open
    }

    /// Kills the workers and what there is of the processes, unless they run by now.
    pub(super) fn give_up_unless_open(&self) {
        let mut state = lock(&self.state);
        state.connections.clear();
        if !state.open {
            self.workers().for_each(|it| it.kill());
            self.maker.made().kill();
        }
    }

    fn failure(&self, place: usize, error: WorkerError) -> RestoreError {
        RestoreError::Worker(self.clients[place].name.clone(), error)
    }
}

/// As it would introduce itself now.
fn attach_of(record: &Record, cookie: u64) -> Attach {
    let settings = record.settings.iter();
    Attach {
        dialect: Dialect::from_parts(record.wire_version, &record.shared_state),
        pid: i32::try_from(record.namespace_pid).unwrap_or_default(),
        command: record.command.clone(),
        socket: record.socket_path.to_string_lossy().into_owned(),
        cookie,
        settings: settings.map(|it| (it.name.clone(), it.value.clone())).collect(),
    }
}

fn sockets_of(record: &Record) -> impl Iterator<Item = RestoredSocket> {
    let path = record.socket_path.to_string_lossy();
    record.socket_ids.iter().map(move |id| RestoredSocket { id: *id, path: path.clone().into_owned() })
}

/// Hands a process's connection and memory to its worker, in as many messages as it takes.
///
/// Pinning takes as long as there is memory, so the limit is how long the worker may do nothing.
fn send_memory(worker: &Worker, connection: UnixStream, memory: SharedMemory, limit: Limit) -> Result<(), WorkerError> {
    let fixed = [OwnedFd::from(connection), memory.ring.into(), memory.staging.into()];
    let (pinned, files): (Vec<Pinned>, Vec<_>) = memory.pinned.into_iter().unzip();
    let files: Vec<i32> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let in_last = pinned.len().min(MAX_FDS - fixed.len());
    let (first_pinned, last_pinned) = pinned.split_at(pinned.len() - in_last);
    let (first_files, last_files) = files.split_at(files.len() - in_last);
    let patience = Patience::WhileItWorks(limit);
    let before = first_pinned.chunks(MAX_FDS).zip(first_files.chunks(MAX_FDS));
    for (pinned, files) in before {
        let pinned = pinned.to_vec();
        worker.ask(&WorkerRequest::Pinned { pinned }, files, patience)?;
    }
    let mut fds = sys::raw(&fixed);
    fds.extend(last_files);
    let pinned = last_pinned.to_vec();
    worker.ask(&WorkerRequest::Connect { pinned }, &fds, patience)
}

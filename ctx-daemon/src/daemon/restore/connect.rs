//! Connects restored processes with their workers, each by itself, when CRIU has completed the process.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rekindle_images::Client as Record;
use rekindle_wire::Dialect;
use rekindle_wire::attach::{Attach, Pinned};
use rekindle_wire::control::WorkerRequest;
use rekindle_wire::frame::MAX_FDS;

use super::super::clients::{Client, ClientState};
use super::super::grants::Uuid;
use super::super::process::{self, Process};
use super::super::worker::{Timeout, WorkerError};
use super::super::{Daemon, attach, lock, sys, wait, wait_timeout};
use super::error::RestoreError;
use super::phases::Part;
use super::shared::{self, SharedMemory};
use super::state::{Restore, State};
use crate::limit::Deadline;

impl Restore {
    /// A process is complete. If it is a client, connects it to its worker now. Returns whether it is a client.
    pub(super) fn resume(&self, daemon: &Arc<Daemon>, pid: i32) -> Result<bool, RestoreError> {
        self.phases().ends(Part::Criu);
        let resumed = self.connect_if_ours(daemon, Process::with_pid(pid)?);
        self.phases().ends(Part::Connect);
        resumed
    }

    fn connect_if_ours(&self, daemon: &Arc<Daemon>, process: Process) -> Result<bool, RestoreError> {
        let pid = process.pid;
        // Its connection may still be on its way from the listener to here.
        let Some(place) = self.place_of(process, daemon.config.timeouts.quiesce.begins())? else {
            return Ok(false);
        };
        let restored = &self.clients[place];
        let has_ring = shared::has_ring(pid);
        if !has_ring.map_err(|source| RestoreError::Shared { pid, source })? {
            return Err(RestoreError::NoMemory(restored.name.clone()));
        }
        let pinned = restored.record.pinned.iter();
        // The content of pinned memory with pieces would be ours to bring back, and that memory is no memfd of the process.
        let pinned = pinned.filter(|it| it.pieces.is_empty());
        let pinned: Vec<_> = pinned.map(|it| (it.address, it.size)).collect();
        let memory = shared::take(pid, &pinned);
        let memory = memory.map_err(|source| RestoreError::Shared { pid, source })?;
        self.phases().ends(Part::Connect);
        self.wait_until(|state| state.may_run(place))?;
        self.phases().ends(Part::Wait);
        self.connect(daemon, place, process, memory)?;
        Ok(true)
    }

    /// The place of the client that a process is, once its connection has arrived.
    fn place_of(&self, process: Process, deadline: Deadline) -> Result<Option<usize>, RestoreError> {
        let pids = process::namespace_pids(process.pid)?;
        let inner = pids.last().copied().unwrap_or(process.pid).unsigned_abs();
        let mut state = lock(&self.state);
        loop {
            let here = |place: &usize| state.reattached(*place).map(|it| it.process);
            let waiting = |place: &usize| !state.is_connected(*place);
            let mut places = (0..self.clients.len()).filter(waiting);
            if let Some(place) = places.find(|place| here(place) == Some(process)) {
                return Ok(Some(place));
            }
            // The process has the same pid in its own namespace as at the dump. CRIU may have had another process of the tree
            // make the connection, where both held the socket.
            let same: Vec<_> = (0..self.clients.len())
                .filter(waiting)
                .filter(|place| self.clients[*place].record.namespace_pid == inner)
                .collect();
            if same.is_empty() {
                return Ok(None);
            }
            if same.iter().all(|place| here(place).is_some()) {
                return match (same.as_slice(), shared::has_ring(process.pid)) {
                    // A process of another pid namespace that happens to have the same number.
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

    /// Waits until a worker has loaded so much.
    fn wait_until(&self, has_loaded: impl Fn(&State) -> bool) -> Result<(), RestoreError> {
        let mut state = lock(&self.state);
        loop {
            // The failure of any client fails the restore.
            if let Some((failed, error)) = state.failed_load() {
                return Err(self.failure(failed, error));
            }
            if has_loaded(&state) {
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
        let no_connection = || RestoreError::NoConnection(restored.name.clone());
        let cookie = lock(&self.state).reattached(place).map(|it| it.cookie).ok_or_else(no_connection)?;
        let sees: Vec<Uuid> = restored.worker.attached().devices.iter().map(|it| it.uuid).collect();
        let allowed = daemon.grants.of_restored(process, restored.record.grant.as_ref(), &sees)?;
        if let Some(may) = allowed.gpus()
            && !sees.iter().all(|it| may.contains(it))
        {
            return Err(RestoreError::OtherGpus(restored.name.clone()));
        }
        let client = Client::new(
            process,
            attach_of(&restored.record, cookie),
            allowed,
            Arc::clone(&restored.worker),
            ClientState::Restoring,
        );
        if daemon.grants.are_shared(&client.allowed) {
            // The worker is asked to share them.
            self.wait_until(|state| state.is_prepared(place))?;
        }
        let (connection, ahead) = self.connected(place, &client).ok_or_else(no_connection)?;
        self.phases().connected(place, process.pid);
        self.reservation.fill(Arc::clone(&client));
        attach::forget_when_dead(daemon, &client);
        daemon.share(&client)?;
        daemon.clients.records.keep(restored.worker.process(), process, connection.as_fd());
        let worker = &restored.worker;
        let sent = if ahead {
            let attach = Box::new(client.attach.clone());
            let comes = worker.say_with(&WorkerRequest::Comes { attach }, &[connection.as_raw_fd()]);
            comes.and_then(|()| send_memory(connection, None, memory, |request, fds| worker.say_ahead(request, fds)))
        } else {
            // Pinning takes as long as there is memory, so the limit is how long the worker may do nothing.
            let timeout = Timeout::WhileItWorks(daemon.config.timeouts.stall);
            send_memory(connection, None, memory, |request, fds| worker.ask(&request, fds, timeout))
        };
        sent.map_err(|error| self.failure(place, error))
    }
}

/// The message with which the process would attach now.
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

/// Hands a process's connection and memory to its worker, in as many messages as it takes, each of which `send` sends. `keeper`: the
/// process runs, and this worker takes it over from its keeper, to which the socket leads; with the message by which the process
/// attached.
pub(in crate::daemon) fn send_memory(
    connection: UnixStream,
    keeper: Option<(Attach, OwnedFd)>,
    memory: SharedMemory,
    send: impl Fn(WorkerRequest, &[RawFd]) -> Result<(), WorkerError>,
) -> Result<(), WorkerError> {
    let (takes_over, keeper) = keeper.unzip();
    let mut fixed = vec![OwnedFd::from(connection)];
    fixed.extend(keeper);
    fixed.extend([memory.ring.into(), memory.staging.into()]);
    let (pinned, files): (Vec<Pinned>, Vec<_>) = memory.pinned.into_iter().unzip();
    let files: Vec<i32> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let in_last = pinned.len().min(MAX_FDS - fixed.len());
    let (first_pinned, last_pinned) = pinned.split_at(pinned.len() - in_last);
    let (first_files, last_files) = files.split_at(files.len() - in_last);
    if let Some(userfault) = &memory.userfault {
        send(WorkerRequest::Userfault, &[userfault.as_raw_fd()])?;
    }
    let before = first_pinned.chunks(MAX_FDS).zip(first_files.chunks(MAX_FDS));
    for (pinned, files) in before {
        let pinned = pinned.to_vec();
        send(WorkerRequest::Pinned { pinned }, files)?;
    }
    let mut fds = sys::raw(&fixed);
    fds.extend(last_files);
    let pinned = last_pinned.to_vec();
    send(WorkerRequest::Connect { pinned, takes_over }, &fds)
}

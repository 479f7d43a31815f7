//! The daemon takes over workers of a daemon that has ended: the counterpart of [`rekindle_ctx_worker::rejoin`].
//!
//! A worker gets data files and is asked about its client's memory. So a process that offers itself as a worker must have a
//! worker's user and be in the daemon's pid namespace, where no client in a container is. The worker's own word does not
//! decide which client it belongs to, since a client may control its worker: the former daemon has recorded that
//! ([`super::worker_records`]). The client's connection, a copy of which comes with the offer, must be the recorded one.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rekindle_wire::attach::{Attach, Attached, CHOSEN_PROTOCOL};
use rekindle_wire::control::{Failing, FailureKind, Reply, WorkerRequest};
use rekindle_wire::frame::{self, FrameError};
use thiserror::Error;
use tracing::{info, warn};

use super::clients::{Client, ClientState};
use super::grants::{Allowed, GrantError};
use super::process::{self, Process};
use super::sys::{self, Credentials};
use super::worker::{Timeout, Worker, WorkerError};
use super::worker_records::RecordError;
use super::{Daemon, attach, message};
use crate::limit::Limit;

/// How long a worker may take to describe itself.
const OPEN_TIMEOUT: Limit = Limit::fixed(Duration::from_secs(30));

#[derive(Debug, Error)]
enum TakeoverError {
    #[error("process {0} is not a worker: its user is not a worker's, or it is in another pid namespace")]
    Stranger(i32),
    #[error("the offer lacks the client's connection")]
    Connection,
    #[error("the client is gone")]
    ClientGone,
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("the client has another worker")]
    HasAnother,
    #[error("cannot tell what the client may use: {0}")]
    Grant(#[from] GrantError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Frame(#[from] FrameError),
    #[error("it cannot be served: {0}")]
    Channel(io::Error),
}

impl Failing for TakeoverError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Stranger(_) | Self::Connection | Self::HasAnother | Self::Record(_) => FailureKind::Refused,
            Self::ClientGone => FailureKind::LostPeer,
            Self::Grant(error) => error.kind(),
            Self::Io(error) | Self::Channel(error) => Failing::kind(error),
            Self::Frame(error) => error.kind(),
        }
    }
}

/// What a worker says of itself and its client.
pub(crate) struct Offer {
    /// The message by which the client attached, and the answer that it got.
    pub(crate) attach: Attach,
    pub(crate) attached: Attached,
    /// The control version that the worker speaks.
    pub(crate) wire: u32,
    /// The client's connection.
    pub(crate) fds: Vec<OwnedFd>,
}

/// Has the worker go on serving its client.
fn open(worker: &Worker, limit: Limit) -> Result<(), WorkerError> {
    // The worker has opened its ring when its daemon ended, or does so when it has loaded its client; otherwise the client would hang.
    worker.ask(&WorkerRequest::Open, &[], Timeout::WhileItWorks(limit))?;
    // It may only keep a client that is suspended deeply.
    worker.suspension(OPEN_TIMEOUT.begins()).map(drop)
}

/// Serves a `Rejoin`.
pub(crate) fn serve(daemon: &Arc<Daemon>, stream: UnixStream, peer: Credentials, from: Process, offer: Offer) {
    let told = stream.try_clone();
    let command = offer.attach.command.clone();
    match take_over(daemon, stream, peer, from, offer) {
        Ok(client) => match open(&client.worker, daemon.config.timeouts.stall) {
            Ok(()) => info!(pid = client.process.pid, command, worker = peer.pid, "taken over"),
            // The worker has its daemon, and hears nothing of this: what comes to it now are requests.
            Err(error) => {
                warn!(worker = peer.pid, command, "taken over, but the worker does not open the ring: {error}")
            }
        },
        Err(error) => {
            warn!(worker = peer.pid, command, "not taken over: {error}");
            // A worker that has its answer takes everything else for requests.
            if let (Ok(stream), false) = (told, matches!(error, TakeoverError::Channel(_))) {
                message::fail(&stream, error);
            }
        }
    }
}

fn take_over(
    daemon: &Arc<Daemon>,
    stream: UnixStream,
    peer: Credentials,
    from: Process,
    offer: Offer,
) -> Result<Arc<Client>, TakeoverError> {
    let Offer { mut attach, attached, wire, fds } = offer;
    if !daemon.sandbox.is_workers_user(peer.uid) || !is_neighbour(peer.pid) {
        return Err(TakeoverError::Stranger(peer.pid));
    }
    let [connection] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| TakeoverError::Connection)?;
    let client = sys::peer_credentials(connection.as_fd())?;
    let process = Process::with_pid(client.pid).map_err(|_| TakeoverError::ClientGone)?;
    daemon.clients.records.check(from, process, connection.as_fd())?;
    let connection = UnixStream::from(connection);
    if sys::is_hung_up(&connection) {
        return Err(TakeoverError::ClientGone);
    }
    drop(connection);
    let same = |it: &Arc<Client>| it.process == process && !it.worker.is_dead();
    if daemon.clients.registry.clients().iter().any(same) {
        return Err(TakeoverError::HasAnother);
    }
    // The client has its worker already. Its container may still have a grant, or may have none.
    let allowed = match daemon.grants.of(process) {
        Err(GrantError::None) => Allowed::default(),
        found => found?,
    };
    frame::send(&stream, &Reply::Rejoined, &[], &[])?;
    let worker = Worker::new(peer.pid, None, attached, wire, stream).map_err(TakeoverError::Channel)?;
    let chosen = attach.settings.iter().find(|(name, _)| name == CHOSEN_PROTOCOL);
    let chosen = chosen.and_then(|(_, protocol)| protocol.parse().ok());
    attach.settings.retain(|(name, _)| name != CHOSEN_PROTOCOL);
    let state = ClientState::Running;
    let client = Client::new(process, attach, allowed, Arc::clone(&worker), state);
    client.choose_protocol(chosen);
    daemon.clients.registry.add(Arc::clone(&client));
    daemon.clients.lost.found(process);
    attach::forget_when_dead(daemon, &client);
    // The configuration may have been another.
    daemon.charges.put(&client.allowed, process, worker.process());
    Ok(client)
}

/// Whether a process is in the daemon's pid namespace.
pub(crate) fn is_at_our_depth(pid: i32) -> bool {
    // Compares the number of pids, which can be read of workers although they are not dumpable.
    let depth = |pid| process::namespace_pids(pid).ok().map(|pids| pids.len());
    let own = i32::try_from(std::process::id()).ok().and_then(depth);
    own.is_some() && own == depth(pid)
}

/// Whether a process is in the daemon's pid and user namespaces. The mount namespace does not count: an init system gives each
/// start of a service a new one.
pub(crate) fn is_neighbour(pid: i32) -> bool {
    if !is_at_our_depth(pid) {
        return false;
    }
    match (fs::read_link("/proc/self/ns/user"), fs::read_link(format!("/proc/{pid}/ns/user"))) {
        (Ok(own), Ok(theirs)) => own == theirs,
        // A daemon that is not root cannot see the user namespace; it serves no other users.
        (Ok(_), Err(error)) => error.kind() == io::ErrorKind::PermissionDenied && sys::own_uid() != 0,
        _ => false,
    }
}

//! A connection from its first message on.
//!
//! Versions are compared before anything else, since only the opening's form is the same in all of them: see
//! `rekindle_wire::version`. A malformed message ends the connection with a line in the log; descriptors that came with it are
//! closed.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rekindle_wire::OLDEST_CONTROL;
use rekindle_wire::control::{Allowances, Failure, FailureKind, Opening, Reply, Request};
use rekindle_wire::frame::{self, FrameError, Message};
use rekindle_wire::version::{control_version, is_spoken};
use tracing::{debug, warn};

use super::connections::Place;
use super::message::{self, MAX_REQUEST};
use super::party::Party;
use super::peer::may_checkpoint;
use super::pidns::PidError;
use super::process::{self, Process};
use super::sys::{self, Credentials};
use super::together;
use super::{
    Daemon, attach, check, dump, gpus, grants, ipc, list, managed, migrate, orders, protocol, registered, restore,
    suspend, takeover, thread,
};

/// How long a connection may stay silent.
const OPENING_TIMEOUT: Duration = Duration::from_secs(10);

/// The socket that a connection came through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// The control socket, for clients and operators.
    Clients,
    /// For workers whose daemon is gone.
    Workers,
}

impl Endpoint {
    /// Whether this endpoint serves the request.
    fn serves(self, request: &Request) -> bool {
        (self == Self::Workers) == matches!(request, Request::Rejoin { .. })
    }
}

/// Serves a connection in a thread of its own, if there is a place for it.
pub(crate) fn serve(daemon: &Arc<Daemon>, stream: UnixStream, endpoint: Endpoint) {
    let copy = match stream.try_clone() {
        Ok(copy) => copy,
        Err(error) => return warn!(%error, "cannot serve a connection"),
    };
    let party = match sys::peer_credentials(stream.as_fd()) {
        Ok(peer) if endpoint == Endpoint::Workers => Party::of_worker(peer),
        Ok(peer) => Party::of_client(peer),
        Err(error) => return warn!(%error, "cannot identify a peer"),
    };
    let place = match daemon.connections.open(party, copy) {
        Ok(place) => place,
        Err(why) => return daemon.connections.say_refused(&why),
    };
    let daemon = Arc::clone(daemon);
    let result = thread("connection", move || handle(&daemon, stream, endpoint, party, &place));
    if let Err(error) = result {
        warn!(%error, "cannot serve a connection");
    }
}

fn handle(daemon: &Arc<Daemon>, stream: UnixStream, endpoint: Endpoint, party: Party, place: &Place) {
    daemon.grants.collect();
    let (peer, process) = match peer(&stream) {
        Ok(peer) => peer,
        Err(error) => return debug!(%error, "a connection whose process is gone"),
    };
    let pending = daemon.clients.registry.connected(process);
    if !wait_for_peer(daemon, &stream, peer) {
        return debug!(pid = peer.pid, "a connection that said nothing");
    }
    let message = match receive_opening(&stream) {
        Ok(message) => message,
        Err(FrameError::Closed) => return,
        Err(error) => return warn!(pid = peer.pid, "closing a connection: {error}"),
    };
    place.speaks();
    let Message { body, fds, .. } = message;
    let request = read(&body);
    daemon.metrics.request(request.as_ref().ok());
    let request = match request {
        Ok(request) => request,
        Err(failure) => {
            warn!(pid = peer.pid, "refused: {failure}");
            return match asks(&body) {
                // The restored process would receive any reply as the worker's.
                Some("Reattach") => {}
                Some("Attach") => attach::refuse(&stream, failure.reason),
                _ => message::fail(&stream, failure),
            };
        }
    };
    match request {
        request if !endpoint.serves(&request) => {
            warn!(pid = peer.pid, uid = peer.uid, "refused a request at the wrong socket");
            message::fail(&stream, Failure::refused("this is not what this socket is for"));
        }
        Request::Attach(_) if peer.pid == 0 => {
            warn!("refused a process in a pid namespace that the daemon cannot see");
            attach::refuse(&stream, PidError::Foreign.to_string());
        }
        Request::Attach(request) => {
            attach::serve(daemon, stream, &pending, process, request, fds);
        }
        Request::Reattach { restore, socket, cookie } => {
            let restores = &daemon.restores;
            restores.reattach(restore, socket, cookie, process, stream);
        }
        Request::Rejoin { attach, attached } => {
            drop(pending);
            let offer = takeover::Offer { attach, attached, wire: body.wire, fds };
            takeover::serve(daemon, stream, peer, process, offer);
        }
        Request::List => message::reply(&stream, &list::clients(daemon, peer)),
        Request::Status => message::reply(&stream, &list::status(daemon, peer)),
        Request::Calls { pid } => message::reply(&stream, &list::calls(daemon, peer, pid)),
        Request::Access { pid } => message::reply(&stream, &list::access(daemon, peer, pid)),
        Request::Check { pid } => {
            // The peer is not about to attach, whether it is in the tree or not.
            drop(pending);
            message::reply(&stream, &check::check(daemon, peer, pid));
        }
        Request::Checkpoint { root, protocol, moment_ms, span } => {
            // This process is not about to attach.
            drop(pending);
            let asked = orders::Asked { root, protocol, timeout: moment_ms.map(Duration::from_millis), span };
            orders::serve(daemon, &stream, (peer, party), &asked);
        }
        Request::Together { roots } => {
            drop(pending);
            together::serve(daemon, &stream, peer, &roots);
        }
        Request::Moment => {
            // The peer is a client, and not about to become one.
            drop(pending);
            message::reply(&stream, &Reply::Moment { awaited: daemon.checkpoints.moment_has_come(process.pid) });
        }
        Request::Protocol { pid, change } => message::reply(&stream, &protocol::serve(daemon, peer, pid, change)),
        Request::Suspend { pid, hold, deep } => {
            drop(pending);
            let how = suspend::How { hold, deep };
            message::reply(&stream, &suspend::suspend(daemon, &stream, &suspend::Asked { peer, pid }, how, fds));
        }
        Request::ResumeSuspended { pid } => {
            drop(pending);
            message::reply(&stream, &suspend::resume(daemon, &suspend::Asked { peer, pid }));
        }
        Request::Warm { .. } | Request::WarmImages | Request::ForgetWarm | Request::ForgetWarmNamed { .. }
            if !may_checkpoint(peer) =>
        {
            warn!(pid = peer.pid, uid = peer.uid, "not allowed to keep images warm");
            let reason =
                "only root and the user that rekindled runs as may keep images warm, and not from inside a container";
            message::fail(&stream, Failure::refused(reason));
        }
        Request::Warm { copies, resident } => {
            drop(pending);
            let wanted = restore::Wanted { copies: copies as usize, resident };
            message::reply(&stream, &restore::warm(daemon, &stream, wanted, fds));
        }
        Request::WarmImages => message::reply(&stream, &restore::list(daemon)),
        Request::ForgetWarm => message::reply(&stream, &restore::forget(daemon, fds)),
        Request::ForgetWarmNamed { name } => message::reply(&stream, &restore::forget_named(daemon, &name)),
        Request::Grant { container, pid, gpus, limits, protocol, share } => {
            drop(pending);
            let asked = grants::Asked { pid, gpus, limits, protocol, share };
            message::reply(&stream, &grants::grant(daemon, peer, &container, &asked));
        }
        Request::Revoke { container } => message::reply(&stream, &grants::revoke(daemon, &container)),
        Request::Import { token } => {
            // The peer is a client, and not about to become one.
            drop(pending);
            message::reply(&stream, &ipc::import(daemon, process, &token));
            // CRIU fails ("Unix socket without peer") if an end of a stopped process's connection closes while it lists sockets: the
            // peer closes first.
            wait_for_peer(daemon, &stream, peer);
        }
        Request::Register { address, size } => {
            // As above.
            drop(pending);
            message::reply(&stream, &registered::register(daemon, process, address, size));
            wait_for_peer(daemon, &stream, peer);
        }
        Request::Userfaultfd => {
            // As above.
            drop(pending);
            managed::serve(daemon.config.clients.userfaultfd, &stream, process);
            wait_for_peer(daemon, &stream, peer);
        }
        Request::Gpus | Request::GpuMemory { .. } | Request::GpuProcesses { .. } | Request::GpuAsk(_) => {
            // As above.
            drop(pending);
            let answer = gpus::answer(daemon, peer, process, request);
            // A daemon that stops sends no failures: a peer whose connection closes asks again, and the next daemon answers.
            if !(daemon.is_stopping() && matches!(answer, Reply::Failed(_))) {
                message::reply(&stream, &answer);
                // As above.
                wait_for_peer(daemon, &stream, peer);
            }
        }
        Request::Pause { .. }
        | Request::Restore
        | Request::RestoreAllowing(_)
        | Request::WatchRestore { .. }
        | Request::HoldRestore { .. }
        | Request::PreCopy { .. }
        | Request::Preload
        | Request::Migration { .. }
        | Request::TakeBack { .. }
        | Request::Arrival { .. }
        | Request::AreNatives
            if !may_checkpoint(peer) =>
        {
            warn!(pid = peer.pid, uid = peer.uid, "not allowed to dump or restore");
            let reason =
                "only root and the user that rekindled runs as may dump and restore, and not from inside a container";
            message::fail(&stream, Failure::refused(reason));
        }
        Request::AreNatives => {
            drop(pending);
            message::reply(&stream, &Reply::AreNatives(daemon.native.any()));
        }
        // During a restore, CRIU may be in the container's cgroup already, where runc puts it; during a dump it is not.
        Request::Pause { .. } if grants::contained(daemon, peer) => {
            message::fail(&stream, Failure::refused("a container may not dump"));
        }
        Request::PreCopy { .. } if grants::contained(daemon, peer) => {
            message::fail(&stream, Failure::refused("a container may not dump"));
        }
        Request::Preload if grants::contained(daemon, peer) => {
            message::fail(&stream, Failure::refused("a container may not load GPU memory in advance"));
        }
        Request::PreCopy { root } => {
            drop(pending);
            dump::pre_copy(daemon, &stream, (peer, body.wire), root, fds);
        }
        Request::Preload => {
            drop(pending);
            restore::preload(daemon, &stream, fds);
        }
        Request::Migrate { root, migration, container, span } => {
            drop(pending);
            let asked = migrate::Asked { root, name: &migration, is_container: container };
            migrate::serve(daemon, &stream, (peer, party), asked, span);
        }
        Request::Migration { migration } => {
            message::reply(&stream, &Reply::Migration(daemon.migrations.state(&migration)));
        }
        Request::TakeBack { migration } => match daemon.migrations.take_back(&migration) {
            Ok(state) => message::reply(&stream, &Reply::Migration(state)),
            Err(failure) => message::fail(&stream, failure),
        },
        Request::Pause { root, leave_running, traceparent } => {
            drop(pending);
            let asked = dump::Asked { root, leave_running, traceparent, wire: body.wire };
            dump::serve(daemon, &stream, peer, asked, fds);
        }
        Request::Restore => {
            drop(pending);
            restore::serve(daemon, &stream, peer, (Allowances::default(), body.wire), fds);
        }
        Request::RestoreAllowing(allowed) => {
            drop(pending);
            restore::serve(daemon, &stream, peer, (allowed, body.wire), fds);
        }
        Request::WatchRestore { hears_first, span } => {
            drop(pending);
            let wish = if hears_first { restore::Wish::Hear } else { restore::Wish::Watch };
            restore::watch::serve(daemon, &stream, peer, wish, span);
        }
        Request::HoldRestore { migration, again, span } => {
            drop(pending);
            restore::watch::serve(daemon, &stream, peer, restore::Wish::Hold { migration, again }, span);
        }
        Request::Arrival { migration } => {
            message::reply(&stream, &Reply::Arrival(daemon.migrations.arrival(&migration)));
        }
        Request::Frozen { .. }
        | Request::Socket { .. }
        | Request::Finish
        | Request::NativeCheckpoint { .. }
        | Request::NativeResume { .. }
        | Request::Resume { .. }
        | Request::HandOver
        | Request::Own
        | Request::Progress => {
            message::fail(&stream, Failure::internal("a connection does not begin with this"));
        }
    }
}

/// The process at the other end. A process that has ended can ask for nothing.
fn peer(stream: &UnixStream) -> std::io::Result<(Credentials, Process)> {
    let peer = sys::peer_credentials(stream.as_fd())?;
    if peer.pid == 0 {
        // The peer is in a pid namespace that is not below ours. It is told when it says what it wants.
        return Ok((peer, Process { pid: 0, start: 0 }));
    }
    // Another process may have the number by now; the descriptor is of the process that connected.
    let pidfd = sys::peer_pidfd(stream.as_fd(), peer.pid)?;
    let process = Process::with_pid(peer.pid)?;
    match sys::wait_readable([pidfd.as_fd()], Some(Duration::ZERO))? {
        [false] => Ok((peer, process)),
        [true] => Err(std::io::ErrorKind::NotFound.into()),
    }
}

/// Waits until the peer says something, or closes its end. A process that CRIU has stopped can do neither, so it has time until its
/// dump is over.
fn wait_for_peer(daemon: &Daemon, stream: &UnixStream, peer: Credentials) -> bool {
    loop {
        match sys::wait_readable([stream.as_fd()], Some(OPENING_TIMEOUT)) {
            Ok([true]) => return true,
            Ok([false]) if daemon.clients.registry.is_held(&process::ancestry(peer.pid)) => {}
            _ => return false,
        }
    }
}

fn receive_opening(stream: &UnixStream) -> Result<Message<Opening>, FrameError> {
    stream.set_read_timeout(Some(OPENING_TIMEOUT))?;
    let message = frame::receive_at_most(stream, MAX_REQUEST, 0)?;
    stream.set_read_timeout(None)?;
    Ok(message)
}

/// The request, if this daemon speaks its version.
fn read(opening: &Opening) -> Result<Request, Failure> {
    let of_other_version = |reason| Failure::new(FailureKind::Version, reason);
    if !is_spoken(opening.oldest, opening.wire) {
        return Err(of_other_version(format!(
            "the peer speaks control version {}, and this rekindled {} speaks {OLDEST_CONTROL} to {}: install one version of Rekindle for all parts",
            opening.wire,
            env!("CARGO_PKG_VERSION"),
            control_version(),
        )));
    }
    serde_json::from_value(opening.request.clone()).map_err(|error| {
        // The error may quote the peer's own characters.
        Failure::internal(format!("malformed request: {}", error.to_string().escape_debug()))
    })
}

/// The name of the request, in any version.
fn asks(opening: &Opening) -> Option<&str> {
    match &opening.request {
        serde_json::Value::String(name) => Some(name),
        serde_json::Value::Object(it) => it.keys().next().map(String::as_str),
        _ => None,
    }
}

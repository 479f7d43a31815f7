//! An order: a command that has CRIU make a checkpoint gives its options, and receives the progress and the result.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use rekindle_images::UnknownProtocol;
use rekindle_wire::control::{CommandSpan, Failing, Failure, FailureKind, Reply, Request};
use rekindle_wire::frame::{self, FrameError};
use thiserror::Error;
use tracing::debug;

use super::checkpoints::{OrderGuard, TooManyOrders};
use super::message::{self, MAX_REQUEST};
use super::party::Party;
use super::peer::{is_operator, may_checkpoint};
use super::pidns::{PidError, PidView};
use super::sys::Credentials;
use super::{Daemon, process};

/// How long a dump may wait for its application's moment. Meanwhile no process of its tree gets a worker.
const MAX_MOMENT_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Why an order is refused.
#[derive(Debug, Error)]
enum OrderError {
    #[error("process {0} does not exist, or is not yours")]
    NoProcess(i32),
    #[error(transparent)]
    Pid(#[from] PidError),
    #[error(transparent)]
    Protocol(#[from] UnknownProtocol),
    #[error(transparent)]
    TooMany(#[from] TooManyOrders),
    #[error(
        "only root and the user that rekindled runs as, on the host itself, may have a dump wait for the application's moment, since only they may dump"
    )]
    MomentNotAllowed,
    #[error("a dump waits for the application's moment for {} s at most", MAX_MOMENT_TIMEOUT.as_secs())]
    MomentTimeout,
}

impl Failing for OrderError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Pid(error) => error.kind(),
            _ => FailureKind::Refused,
        }
    }
}

/// The options of a checkpoint.
pub(crate) struct Asked {
    pub(crate) root: i32,
    pub(crate) protocol: Option<String>,
    /// How long the dump waits for the application's moment; none if it does not wait.
    pub(crate) timeout: Option<Duration>,
    /// The command's span.
    pub(crate) span: Option<CommandSpan>,
}

/// Serves an order until its connection closes.
pub(crate) fn serve(daemon: &Daemon, stream: &UnixStream, peer: (Credentials, Party), asked: &Asked) {
    let _session = match daemon.connections.session(stream) {
        Ok(session) => session,
        Err(error) => return message::fail(stream, error),
    };
    let order = match accept(daemon, peer, asked) {
        Ok(order) => order,
        Err(error) => return message::fail(stream, error),
    };
    message::reply(stream, &Reply::Awaited);
    loop {
        match frame::receive_at_most::<Request>(stream, MAX_REQUEST, 0) {
            Ok(message) if matches!(message.body, Request::Progress) => {
                message::reply(stream, &Reply::Progress(order.progress()));
            }
            Ok(_) => return message::fail(stream, Failure::internal("only Progress can be asked now")),
            Err(FrameError::Closed) => return,
            Err(error) => return debug!(%error, "an order's connection closes"),
        }
    }
}

fn accept<'a>(
    daemon: &'a Daemon,
    (peer, party): (Credentials, Party),
    asked: &Asked,
) -> Result<OrderGuard<'a>, OrderError> {
    let ours = PidView::of(peer.pid)?.to_ours(asked.root)?;
    let owner = process::user(ours);
    if owner.is_none() || !is_operator(peer) && owner != Some(peer.uid) {
        return Err(OrderError::NoProcess(asked.root));
    }
    let protocol = asked.protocol.as_deref().map(str::parse).transpose()?;
    match asked.timeout {
        // The dump that waits would be another user's.
        Some(_) if !may_checkpoint(peer) => return Err(OrderError::MomentNotAllowed),
        Some(timeout) if timeout > MAX_MOMENT_TIMEOUT => return Err(OrderError::MomentTimeout),
        _ => {}
    }
    Ok(daemon.checkpoints.order(party, ours, protocol, asked.timeout, asked.span.map(|span| (peer.pid, span)))?)
}

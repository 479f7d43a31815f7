//! How a worker that serves a client connects to a new daemon when its own is gone.
//!
//! ```text
//!   channel closes ─► (give up what was being saved, open the ring) ─► connect, Rejoin + [client's connection]
//!                        ▲                                                │ every second
//!                        └──────────── no daemon, or it refuses ──────────┤
//!                                                                         └─► Rejoined: the connection is the channel
//! ```
//!
//! A daemon may be upgraded, restarted or killed while applications run: their workers go on without one.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rekindle_wire::attach::{Attach, Attached};
use rekindle_wire::control::{Opening, Reply, Request};
use rekindle_wire::frame;
use thiserror::Error;
use tracing::{info, warn};

/// The path of the workers' endpoint is that of the control socket, which workers may not use, with this suffix.
pub const WORKERS_SUFFIX: &str = ".workers";

/// The variable in which a worker's daemon states where it listens.
pub const SOCKET_VARIABLE: &str = "REKINDLE_SOCKET";

const RETRY: Duration = Duration::from_secs(1);
/// How long a daemon may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

#[derive(Debug, Error)]
enum RejoinError {
    #[error("there is no daemon: {0}")]
    NoDaemon(std::io::Error),
    #[error("the daemon does not take it: {0}")]
    Refused(String),
    #[error(transparent)]
    Frame(#[from] frame::FrameError),
}

/// Offers this worker to the daemon that listens at the address of the previous one, until a daemon accepts. Returns the new
/// channel. Returns `None` if `client_is_gone` says so, or if no address of daemons is known: then there is nothing left to
/// serve.
///
/// `client` is the client's connection, which the caller keeps: the daemon compares it with the recorded connection of its
/// predecessor.
pub fn rejoin<G: Fn() -> bool>(
    attach: &Attach,
    attached: &Attached,
    client: BorrowedFd<'_>,
    client_is_gone: G,
) -> Option<UnixStream> {
    let mut path = std::env::var_os(SOCKET_VARIABLE)?;
    path.push(WORKERS_SUFFIX);
    let request = Request::Rejoin { attach: attach.clone(), attached: attached.clone() };
    let mut last = String::new();
    while !client_is_gone() {
        match try_once(path.as_ref(), &request, client) {
            Ok(channel) => {
                info!(client = attach.pid, "a daemon has taken over this worker");
                return Some(channel);
            }
            Err(error) => {
                let error = error.to_string();
                if error != last {
                    warn!(client = attach.pid, "serving without a daemon: {error}");
                    last = error;
                }
            }
        }
        std::thread::sleep(RETRY);
    }
    None
}

fn try_once(path: &std::path::Path, request: &Request, client: BorrowedFd<'_>) -> Result<UnixStream, RejoinError> {
    let channel = UnixStream::connect(path).map_err(RejoinError::NoDaemon)?;
    let opening = Opening::new(request).map_err(frame::FrameError::from)?;
    channel.set_read_timeout(Some(ANSWER)).map_err(RejoinError::NoDaemon)?;
    frame::send(&channel, &opening, &[], &[client.as_raw_fd()])?;
    match frame::receive::<Reply>(&channel)?.body {
        Reply::Rejoined => {
            channel.set_read_timeout(None).map_err(RejoinError::NoDaemon)?;
            Ok(channel)
        }
        Reply::Failed(failure) => Err(RejoinError::Refused(failure.reason)),
        _ => Err(RejoinError::Refused("an answer that does not fit; use one version of Rekindle".to_owned())),
    }
}

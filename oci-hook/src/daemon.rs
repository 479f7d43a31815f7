//! Requests to the daemon.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rekindle_wire::control::{GpuInfo, Opening, Reply, Request};
use rekindle_wire::frame;
use thiserror::Error;

use crate::host;

/// How long the daemon may take. It answers when its first worker is ready, or after its own timeout if none becomes ready.
const TIMEOUT: Duration = Duration::from_secs(180);

/// An error of a request.
#[derive(Debug, Error)]
pub(crate) enum DaemonError {
    #[error("{}", host::unreachable(path, source))]
    Unreachable { path: PathBuf, source: io::Error },
    #[error("the daemon at {} answers in a way that this version does not understand: {source}", path.display())]
    Protocol { path: PathBuf, source: frame::FrameError },
    #[error("the daemon says: {0}")]
    Refused(String),
    #[error("the daemon does not know the GPUs yet: {0}")]
    NoGpu(String),
}

/// Sends one request, and returns the reply. A reply that reports a failure becomes an error.
pub(crate) fn ask(socket: &Path, request: &Request) -> Result<Reply, DaemonError> {
    let unreachable = |source| DaemonError::Unreachable { path: socket.into(), source };
    let protocol = |source| DaemonError::Protocol { path: socket.into(), source };
    let stream = UnixStream::connect(socket).map_err(unreachable)?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(unreachable)?;
    let opening = Opening::new(request).map_err(|error| protocol(error.into()))?;
    frame::send(&stream, &opening, &[], &[]).map_err(protocol)?;
    match frame::receive(&stream).map_err(protocol)?.body {
        Reply::Failed(failure) => Err(DaemonError::Refused(failure.reason)),
        reply => Ok(reply),
    }
}

/// The daemon's GPUs, in its order.
pub(crate) fn gpus(socket: &Path) -> Result<Vec<GpuInfo>, DaemonError> {
    match ask(socket, &Request::Status)? {
        Reply::Status(status) if !status.gpus.is_empty() => Ok(status.gpus),
        Reply::Status(status) => {
            let reason = status.problem.unwrap_or_else(|| "no worker is up; try again in a moment".to_owned());
            Err(DaemonError::NoGpu(reason))
        }
        _ => Err(DaemonError::Refused("an unexpected reply".to_owned())),
    }
}

//! Asking the daemon.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rekindle_wire::control::{GpuInfo, Opening, Reply, Request};
use rekindle_wire::frame;
use thiserror::Error;

use crate::host;

/// The daemon answers when its first worker is up, and says after its own time when none comes up.
const ANSWER: Duration = Duration::from_secs(180);

/// Why there is no answer.
#[derive(Debug, Error)]
pub(crate) enum DaemonError {
    #[error("{}", host::away(path, source))]
    Away { path: PathBuf, source: io::Error },
    #[error("the daemon at {} does not answer as this version understands it: {source}", path.display())]
    Talk { path: PathBuf, source: frame::FrameError },
    #[error("the daemon says: {0}")]
    Refused(String),
    #[error("the daemon knows no GPU yet: {0}")]
    NoGpu(String),
}

/// Sends one request, and returns the answer unless it is that it cannot be done.
pub(crate) fn ask(socket: &Path, request: &Request) -> Result<Reply, DaemonError> {
    let away = |source| DaemonError::Away { path: socket.into(), source };
    let talk = |source| DaemonError::Talk { path: socket.into(), source };
    let stream = UnixStream::connect(socket).map_err(away)?;
    stream.set_read_timeout(Some(ANSWER)).map_err(away)?;
    let opening = Opening::new(request).map_err(|error| talk(error.into()))?;
    frame::send(&stream, &opening, &[], &[]).map_err(talk)?;
    match frame::receive(&stream).map_err(talk)?.body {
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
        _ => Err(DaemonError::Refused("something that does not answer what it was asked".to_owned())),
    }
}

//! The connection to the daemon.

use std::env;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rekindle_wire::control::{Failure, Opening, Reply, Request};
use rekindle_wire::frame::{self, FrameError};
use thiserror::Error;

use crate::log;

/// How long the daemon may take to answer a probe before a session. A stopped daemon must not delay dumps of other processes.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the plugin waits for a reply within a session before it probes the daemon, and how long the daemon may take to
/// answer that probe. The daemon may be busy, but a stopped one must not delay CRIU, which may keep the tasks frozen.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
const SESSION_TIMEOUT: Duration = Duration::from_secs(10);

/// An error of a request to the daemon.
#[derive(Debug, Error)]
pub enum DaemonError {
    /// No daemon listens at the socket.
    #[error("no daemon at {path}: {source}")]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// The failure of the system call.
        source: io::Error,
    },
    /// The daemon listens, but does not answer.
    #[error("the daemon at {path} is not answering: {source}")]
    Silent {
        /// The socket.
        path: PathBuf,
        /// The error of the answer.
        source: FrameError,
    },
    /// The daemon refuses the request.
    #[error("{0}")]
    Refused(Failure),
    /// The connection broke.
    #[error("lost the daemon: {0}")]
    Lost(#[from] FrameError),
    /// The reply does not fit the request.
    #[error("the daemon sent an unexpected reply: {0:?}")]
    Unexpected(Box<Reply>),
}

/// A session with the daemon. It lasts until this is dropped or CRIU ends, and its end tells the daemon that nothing
/// more will come. The descriptor is close-on-exec, and restored tasks do not hold it: CRIU closes what it had open in
/// each task that it makes, before it opens the task's own files.
#[derive(Debug)]
pub struct Daemon {
    path: PathBuf,
    socket: UnixStream,
}

/// The daemon's socket. (Under podman it is always the default one: CRIU gets `PATH` and little else.)
pub fn socket_path() -> PathBuf {
    env::var_os("REKINDLE_SOCKET")
        .filter(|path| !path.is_empty())
        .unwrap_or_else(|| rekindle_wire::control::DEFAULT_SOCKET.into())
        .into()
}

/// Connects to the daemon's socket, and tries again after a signal.
pub fn connect(path: &Path) -> Result<UnixStream, DaemonError> {
    loop {
        match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(socket) => return Ok(socket),
            Err(source) => {
                return Err(DaemonError::Unreachable { path: path.into(), source });
            }
        }
    }
}

/// Checks, without a long wait, that a daemon answers and understands this version.
pub fn probe(path: &Path) -> Result<(), DaemonError> {
    probe_within(path, PROBE_TIMEOUT)
}

/// Whether a process of this machine uses the driver by itself. Without an answer, or with a daemon that does not know the question,
/// there is none.
pub fn are_natives(path: &Path) -> bool {
    let ask = || {
        let socket = connect(path).ok()?;
        socket.set_read_timeout(Some(PROBE_TIMEOUT)).ok()?;
        socket.set_write_timeout(Some(PROBE_TIMEOUT)).ok()?;
        open(&socket, &Request::AreNatives, &[]).ok()?;
        match frame::receive(&socket).ok()?.body {
            Reply::AreNatives(any) => Some(any),
            _ => None,
        }
    };
    ask().unwrap_or(false)
}

fn probe_within(path: &Path, timeout: Duration) -> Result<(), DaemonError> {
    let socket = connect(path)?;
    let silent = |source| DaemonError::Silent { path: path.into(), source };
    socket
        .set_read_timeout(Some(timeout))
        .and_then(|()| socket.set_write_timeout(Some(timeout)))
        .map_err(|error| silent(error.into()))?;
    open(&socket, &Request::Status, &[]).map_err(silent)?;
    match frame::receive(&socket).map_err(silent)?.body {
        Reply::Status(_) => Ok(()),
        Reply::Failed(failure) => Err(DaemonError::Refused(failure)),
        other => Err(DaemonError::Unexpected(Box::new(other))),
    }
}

/// Sends a connection's first message.
pub fn open(socket: &UnixStream, request: &Request, fds: &[RawFd]) -> Result<(), FrameError> {
    frame::send(socket, &Opening::new(request)?, &[], fds)
}

impl Daemon {
    /// Opens a session and waits for the first reply as long as the daemon answers probes.
    pub fn session(path: &Path, request: &Request, image_dir: RawFd) -> Result<(Self, Reply), DaemonError> {
        let daemon = Self { path: path.into(), socket: connect(path)? };
        // Requests are short, and a reply is complete when it begins to arrive: neither waits for a working daemon.
        let limited = daemon.socket.set_write_timeout(Some(SESSION_TIMEOUT));
        limited.and_then(|()| daemon.socket.set_read_timeout(Some(SESSION_TIMEOUT))).map_err(FrameError::from)?;
        open(&daemon.socket, request, &[image_dir])?;
        let reply = daemon.reply()?;
        Ok((daemon, reply))
    }

    /// Sends a later request of the session and waits for its reply.
    pub fn ask(&self, request: &Request) -> Result<Reply, DaemonError> {
        frame::send(&self.socket, request, &[], &[])?;
        self.reply()
    }

    fn reply(&self) -> Result<Reply, DaemonError> {
        while !is_readable(&self.socket, POLL_INTERVAL) {
            if let Err(error) = probe_within(&self.path, SESSION_TIMEOUT)
                && !is_readable(&self.socket, Duration::ZERO)
            {
                return Err(error);
            }
        }
        match frame::receive(&self.socket)?.body {
            Reply::Failed(failure) => {
                // Scripts that read CRIU's log use this line.
                log::info(&format!("failure kind: {}", failure.kind.as_str()));
                Err(DaemonError::Refused(failure))
            }
            reply => Ok(reply),
        }
    }
}

/// Whether the socket has data to read, or has ended, within this time.
fn is_readable(socket: &UnixStream, time: Duration) -> bool {
    let mut entry = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, a local. A signal ends the wait early; the daemon then gets one more probe.
    unsafe { libc::poll(&raw mut entry, 1, time.as_millis() as i32) > 0 }
}

/// The error for a reply that does not fit the request.
pub fn unexpected(reply: Reply) -> DaemonError {
    DaemonError::Unexpected(Box::new(reply))
}

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

/// How long a daemon may take to say that it is there. A stopped one must not hold up dumps of other processes.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a daemon may take for an answer before it is asked whether it is still there, and how long it may take for
/// that: it may be busy, but a stopped one must not hold up CRIU, which may hold the tasks.
const LOOK: Duration = Duration::from_secs(5);
const PATIENCE_WITHIN: Duration = Duration::from_secs(10);

/// Why the daemon did not answer as it should.
#[derive(Debug, Error)]
pub enum DaemonError {
    /// Nobody listens.
    #[error("no daemon at {path}: {source}")]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It listens, but does not answer.
    #[error("the daemon at {path} is not answering: {source}")]
    Silent {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: FrameError,
    },
    /// It says no, and why.
    #[error("{0}")]
    Refused(Failure),
    /// The connection broke.
    #[error("lost the daemon: {0}")]
    Lost(#[from] FrameError),
    /// A reply to some other request.
    #[error("the daemon answers out of turn: {0:?}")]
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

/// Connects, also when a signal comes between.
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

/// Asks whether a daemon that understands us is there, without waiting long.
pub fn probe(path: &Path) -> Result<(), DaemonError> {
    probe_within(path, PATIENCE)
}

fn probe_within(path: &Path, patience: Duration) -> Result<(), DaemonError> {
    let socket = connect(path)?;
    let silent = |source| DaemonError::Silent { path: path.into(), source };
    socket
        .set_read_timeout(Some(patience))
        .and_then(|()| socket.set_write_timeout(Some(patience)))
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
    /// Opens a session and waits for the first reply, however long it takes, if only the daemon is there.
    pub fn session(path: &Path, request: &Request, image_dir: RawFd) -> Result<(Self, Reply), DaemonError> {
        let daemon = Self { path: path.into(), socket: connect(path)? };
        // What is sent is short, and what comes comes at once: neither waits for a daemon that is well.
        let limited = daemon.socket.set_write_timeout(Some(PATIENCE_WITHIN));
        limited.and_then(|()| daemon.socket.set_read_timeout(Some(PATIENCE_WITHIN))).map_err(FrameError::from)?;
        open(&daemon.socket, request, &[image_dir])?;
        let reply = daemon.reply()?;
        Ok((daemon, reply))
    }

    /// As [`Daemon::session`], for what follows.
    pub fn ask(&self, request: &Request) -> Result<Reply, DaemonError> {
        frame::send(&self.socket, request, &[], &[])?;
        self.reply()
    }

    fn reply(&self) -> Result<Reply, DaemonError> {
        while !is_readable(&self.socket, LOOK) {
            if let Err(error) = probe_within(&self.path, PATIENCE_WITHIN)
                && !is_readable(&self.socket, Duration::ZERO)
            {
                return Err(error);
            }
        }
        match frame::receive(&self.socket)?.body {
            Reply::Failed(failure) => {
                // For scripts that read CRIU's log.
                log::info(&format!("failure kind: {}", failure.kind.as_str()));
                Err(DaemonError::Refused(failure))
            }
            reply => Ok(reply),
        }
    }
}

/// Whether there is something to read, be it the end, within this time.
fn is_readable(socket: &UnixStream, time: Duration) -> bool {
    let mut entry = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, a local. A signal ends the wait early, and the daemon is asked once more.
    unsafe { libc::poll(&raw mut entry, 1, time.as_millis() as i32) > 0 }
}

/// The number by which the kernel tells a socket, the same for whoever holds it.
pub fn cookie(fd: RawFd) -> Result<u64, String> {
    let mut cookie = 0_u64;
    let mut size = size_of::<u64>() as libc::socklen_t;
    // SAFETY: `cookie` has the size that SO_COOKIE asks for.
    let result =
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_COOKIE, (&raw mut cookie).cast(), &raw mut size) };
    match result {
        0 => Ok(cookie),
        _ => Err(format!("a socket has no cookie: {}", std::io::Error::last_os_error())),
    }
}

/// Whether something is queued on a socket that its process has not read.
pub fn has_unread(fd: RawFd) -> Result<bool, String> {
    let mut bytes = 0;
    // SAFETY: SIOCINQ (FIONREAD) writes an int.
    match unsafe { libc::ioctl(fd, libc::FIONREAD, &raw mut bytes) } {
        0 => Ok(bytes > 0),
        _ => Err(format!("cannot look at a socket's queue: {}", std::io::Error::last_os_error())),
    }
}

/// The error that a reply to some other request is.
pub fn out_of_turn(reply: Reply) -> String {
    DaemonError::Unexpected(Box::new(reply)).to_string()
}

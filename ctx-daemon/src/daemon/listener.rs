//! The control socket: one daemon to a path. Beside it is the workers' endpoint, a socket for workers whose daemon is gone.
//! Workers run as users that may not connect to the control socket, and the endpoint serves no other request.

use std::fs::{File, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;
use tracing::{debug, error, warn};

use super::connection::{self, Endpoint};
use super::sandbox::{self, Sandbox};
use super::stale_socket::{self, Stale};
use super::{Daemon, sys};
use crate::config::Config;
use rekindle_ctx_worker::rejoin::WORKERS_SUFFIX;

/// How long a daemon that starts, or one that stops, may hold the lock without listening.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a daemon that was killed may still seem to serve: a process that it was about to start has its lock and its sockets until it
/// executes its program.
const GRACE: Duration = Duration::from_secs(1);
/// The pause between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// The sockets, and the lock that says which daemon they belong to.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: UnixListener,
    path: PathBuf,
    workers: UnixListener,
    workers_path: PathBuf,
    _lock: File,
}

/// Why the daemon cannot listen.
#[derive(Debug, Error)]
pub(crate) enum ListenError {
    #[error("another rekindled serves {}: stop it, or give this one another --socket", .path.display())]
    Taken { path: PathBuf },
    #[error("cannot {action} {}: {source}", .path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

impl Listener {
    /// Makes the sockets, in place of those that a dead daemon left.
    pub(crate) fn bind(config: &Config, sandbox: &Sandbox) -> Result<Self, ListenError> {
        let path = &config.socket.path;
        let failed = |action, path: &Path| {
            let path = path.to_owned();
            move |source| ListenError::Io { action, path, source }
        };
        if let Some(parent) = path.parent()
            && !parent.is_dir()
        {
            std::fs::create_dir_all(parent).map_err(failed("make the directory", parent))?;
            // Clients of every user must reach the socket; the socket's own mode decides who may use it.
            std::fs::set_permissions(parent, Permissions::from_mode(0o755))
                .map_err(failed("set the mode of", parent))?;
        }
        let lock = lock_file(path)?;
        remove_stale(path)?;
        let socket = UnixListener::bind(path).map_err(failed("listen on", path))?;
        if let Some(group) = &config.socket.group {
            let group = sys::group(group).map_err(failed("find the group of", path))?;
            chown(path, None, Some(group)).map_err(failed("set the group of", path))?;
        }
        std::fs::set_permissions(path, Permissions::from_mode(config.socket.mode))
            .map_err(failed("set the mode of", path))?;
        let workers_path = beside(path, WORKERS_SUFFIX);
        remove_stale(&workers_path)?;
        let workers = UnixListener::bind(&workers_path).map_err(failed("listen on", &workers_path))?;
        sandbox::restrict_endpoint(&workers_path, sandbox.group())
            .map_err(failed("set group and mode of", &workers_path))?;
        if sandbox.group().is_some()
            && let Some(folder) = sandbox::closed_folder(&workers_path)
        {
            warn!("the workers' users cannot enter {}: workers will not find the next daemon", folder.display());
        }
        Ok(Self { socket, path: path.clone(), workers, workers_path, _lock: lock })
    }

    /// The acceptors of connections, each for a thread of its own.
    pub(crate) fn acceptors(&self) -> io::Result<[Acceptor; 2]> {
        Ok([
            Acceptor { socket: self.socket.try_clone()?, endpoint: Endpoint::Clients },
            Acceptor { socket: self.workers.try_clone()?, endpoint: Endpoint::Workers },
        ])
    }

    /// Removes the sockets, so that no process finds the daemon any more.
    pub(crate) fn remove(&self) {
        for path in [&self.path, &self.workers_path] {
            if let Err(error) = std::fs::remove_file(path) {
                debug!(path = %path.display(), %error, "cannot remove the socket");
            }
        }
    }
}

/// Accepts connections.
#[derive(Debug)]
pub(crate) struct Acceptor {
    socket: UnixListener,
    endpoint: Endpoint,
}

impl Acceptor {
    /// Serves each connection in a thread, until the daemon stops.
    pub(crate) fn accept_all(&self, daemon: &Arc<Daemon>) {
        loop {
            match self.socket.accept() {
                _ if daemon.is_stopping() => return,
                Ok((stream, _)) => connection::serve(daemon, stream, self.endpoint),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // Most likely the daemon is out of descriptors: it gets some back when other connections end.
                    let closed = daemon.connections.close_a_silent_one();
                    error!(%error, closed, "cannot accept a connection");
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }
}

/// The lock is held as long as the daemon lives, so that two daemons that start at once do not both find a stale socket. The
/// lock alone keeps no daemon out: the socket's directory may be visible in containers, where anybody can hold the lock.
fn lock_file(socket: &Path) -> Result<File, ListenError> {
    let path = beside(socket, ".lock");
    let failed = |action| {
        let path = path.clone();
        move |source| ListenError::Io { action, path, source }
    };
    let file = File::options().write(true).create(true).truncate(false).open(&path).map_err(failed("open"))?;
    let began = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => return Err(failed("lock")(error)),
            Err(TryLockError::WouldBlock) if began.elapsed() >= GRACE && UnixStream::connect(socket).is_ok() => {
                return Err(ListenError::Taken { path: socket.to_owned() });
            }
            Err(TryLockError::WouldBlock) if began.elapsed() >= LOCK_TIMEOUT => {
                warn!("{} is locked, but no daemon serves: starting anyway", path.display());
                return Ok(file);
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
        }
    }
}

fn beside(socket: &Path, what: &str) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(what);
    PathBuf::from(name)
}

fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let began = Instant::now();
    let owned = || path.to_owned();
    loop {
        match stale_socket::remove(path) {
            Ok(()) => return Ok(()),
            Err(Stale::Taken) if began.elapsed() < GRACE => std::thread::sleep(LOOK),
            Err(Stale::Taken) => return Err(ListenError::Taken { path: owned() }),
            Err(Stale::Io { action, source }) => return Err(ListenError::Io { action, path: owned(), source }),
        }
    }
}

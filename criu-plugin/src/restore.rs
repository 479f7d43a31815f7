//! A restore.
//!
//! ```text
//!            init(RESTORE)
//!   ────────┬── the image is none of ours ──> Foreign
//!           ├── cannot be restored ─────────> init fails: nothing has run yet
//!           └── workers are loading ────────> Loading ── RESUME_DEVICES_LATE(pid)* ──┬── the last: rings open ──> Open
//!                                                │                                   └── any fails ────────────> Failed
//!                                          RESTORE_UNIX_SK, in each target:                the whole tree is killed
//!                                          a connection of its own
//! ```

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rekindle_wire::control::{ALLOW_VARIABLE, Allowances, Reply, Request, RestoredSocket};
use rekindle_wire::userfault::Userfault;
use thiserror::Error;

use crate::answer::{Answer, Exit};
use crate::daemon::{self, Daemon, DaemonError};
use crate::guard::{self, GuardError};
use crate::host::{self, Inventory};
use crate::managed::UserfaultError;
use crate::natives::{self, NativeError};
use crate::socket::{self, SocketError};
use crate::{log, tree};

/// The image that the daemon has written into CRIU's image directory.
const MANIFEST: &std::ffi::CStr = c"rekindle.img";

/// An error of a hook, which fails the restore.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// CRIU does not tell where the image is.
    #[error("CRIU has no image directory")]
    NoImageDirectory,
    /// The image lacks the daemon's part.
    #[error("the processes used a GPU, but rekindle.img is missing from the image directory")]
    NoManifest,
    /// The image directory cannot be searched.
    #[error("cannot look for rekindle.img: {0}")]
    Manifest(io::Error),
    /// The environment allows something unknown.
    #[error(
        "{variable} allows \"{0}\", which is unknown; it can allow {driver} and {gpu}",
        variable = ALLOW_VARIABLE,
        driver = Allowances::OTHER_DRIVER,
        gpu = Allowances::OTHER_GPU
    )]
    UnknownAllowance(String),
    /// The daemon cannot load the image.
    #[error("the processes used a GPU and cannot be restored: {0}")]
    Prepare(#[source] DaemonError),
    /// A request to the daemon failed.
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    /// A process with managed memory cannot be restored here.
    #[error(transparent)]
    Userfault(#[from] UserfaultError),
    /// A new socket cannot be examined.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// A process cannot continue with its worker.
    #[error("process {pid} cannot go on: {source}; killing the restored processes")]
    Resume {
        /// The process.
        pid: i32,
        /// The cause.
        source: NativeError,
    },
    /// A process lacks pages, and nobody guards it.
    #[error("process {pid} must not run before CRIU has brought its pages: {source}; killing the restored processes")]
    Unguarded {
        /// The root of the tree.
        pid: i32,
        /// The cause.
        source: GuardError,
    },
    /// Another process of the tree could not continue.
    #[error("killed with the others")]
    Killed,
}

/// The state of a restore.
#[derive(Debug, Default)]
pub enum Restore {
    /// The image has no GPU processes.
    #[default]
    Foreign,
    /// Workers are loading, and CRIU rebuilds the processes.
    Loading(Loading),
    /// The rings are open.
    Open,
    /// The processes have been killed.
    Failed,
}

/// A restore that includes clients.
#[derive(Debug)]
pub struct Loading {
    daemon: Daemon,
    restore: u64,
    sockets: Vec<RestoredSocket>,
    /// The processes for which CRIU called RESUME_DEVICES_LATE, the root first.
    seen: Vec<i32>,
}

impl Restore {
    /// init(RESTORE). An error fails the restore before anything runs.
    pub fn begin() -> Result<Self, RestoreError> {
        let inventory = host::take_from_inventory();
        let Some(image_dir) = host::image_dir() else {
            return match inventory {
                Inventory::Names => Err(RestoreError::NoImageDirectory),
                _ => Ok(Self::Foreign),
            };
        };
        match (inventory, has_manifest(image_dir)) {
            (Inventory::Omits, Ok(true)) => {
                log::warn("rekindle.img is of another dump than the rest of the image directory");
                return Ok(Self::Foreign);
            }
            (Inventory::Omits, _) | (Inventory::Unknown, Ok(false)) => return Ok(Self::Foreign),
            (Inventory::Names, Ok(false)) => {
                return Err(RestoreError::NoManifest);
            }
            (_, Err(error)) => return Err(error),
            (_, Ok(true)) => {}
        }
        let path = daemon::socket_path();
        let (daemon, reply) = Daemon::session(&path, &request()?, image_dir).map_err(RestoreError::Prepare)?;
        match reply {
            Reply::Prepared { restore, sockets } => {
                Ok(Self::Loading(Loading { daemon, restore, sockets, seen: Vec::new() }))
            }
            Reply::NotOurs if inventory != Inventory::Names => Ok(Self::Foreign),
            other => Err(daemon::unexpected(other).into()),
        }
    }

    /// RESTORE_UNIX_SK: the new socket. Runs in the process that is being restored, in its namespaces; the session's
    /// descriptor is closed there and its number may be taken.
    pub fn socket(&self, id: u32) -> Result<Answer, RestoreError> {
        let Self::Loading(loading) = self else {
            return Ok(Answer::NotOurs);
        };
        let Some(dumped) = loading.sockets.iter().find(|socket| socket.id == id) else {
            return Ok(Answer::NotOurs);
        };
        let socket = reattach(loading.restore, dumped)?;
        Ok(Answer::Descriptor(socket.into_raw_fd()))
    }

    /// RESTORE_EXT_FILE: a userfaultfd of the process that is being restored, in which this runs. It has no effect until the
    /// process's worker uses it.
    pub fn external_file(&self) -> Result<Answer, RestoreError> {
        if !matches!(self, Self::Loading(_)) {
            return Ok(Answer::NotOurs);
        }
        let made = Userfault::new().map_err(UserfaultError::Refused)?;
        Ok(Answer::Descriptor(OwnedFd::from(made).into_raw_fd()))
    }

    /// RESUME_DEVICES_LATE: the process is complete, but stopped.
    pub fn resume(&mut self, pid: i32) -> Result<Answer, RestoreError> {
        // Also for processes that use no GPU.
        if let Err(source) = guard::tell_once(pid) {
            self.kill(pid);
            tree::kill(&[pid]);
            return Err(RestoreError::Unguarded { pid, source });
        }
        let loading = match self {
            Self::Loading(loading) => loading,
            Self::Failed => return Err(RestoreError::Killed),
            Self::Foreign | Self::Open => return Ok(Answer::NotOurs),
        };
        loading.seen.push(pid);
        let source = match loading.daemon.ask(&Request::Resume { pid }) {
            Ok(Reply::Resumed { ours, open }) => {
                if open {
                    *self = Self::Open;
                }
                return Ok(Answer::ours(ours));
            }
            Ok(Reply::Native(native)) => match natives::ask(&loading.daemon, native, &Request::NativeResume { pid }) {
                Ok(open) => {
                    log::info(&format!("process {pid} has its GPU memory back"));
                    if open {
                        *self = Self::Open;
                    }
                    return Ok(Answer::Done);
                }
                Err(error) => error,
            },
            Ok(other) => daemon::unexpected(other).into(),
            Err(error) => error.into(),
        };
        self.kill(pid);
        Err(RestoreError::Resume { pid, source })
    }

    /// Kills all processes of the restore. CRIU only logs an error of RESUME_DEVICES_LATE, and lets the process run.
    pub fn kill(&mut self, pid: i32) {
        match mem::take(self) {
            Self::Loading(loading) => {
                *self = Self::Failed;
                tree::kill(&loading.seen);
                tree::kill(&[pid]);
            }
            other => *self = other,
        }
    }

    /// exit(RESTORE).
    pub fn exit(&mut self, status: i32) -> Exit {
        let reason = match mem::take(self) {
            _ if status != 0 => return Exit::Return,
            Self::Foreign | Self::Open => return Exit::Return,
            Self::Failed => "the restored processes have been killed",
            // Another plugin may have taken their hooks.
            Self::Loading(_) => {
                "CRIU has not asked about all restored GPU processes: the restore is given up, and they are killed"
            }
        };
        log::error(reason);
        Exit::Process
    }
}

fn has_manifest(image_dir: RawFd) -> Result<bool, RestoreError> {
    // SAFETY: a descriptor and a string that ends in NUL.
    if unsafe { libc::faccessat(image_dir, MANIFEST.as_ptr(), libc::F_OK, 0) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::NotFound => Ok(false),
        _ => Err(RestoreError::Manifest(error)),
    }
}

/// The first request, with the differences that the environment allows.
fn request() -> Result<Request, RestoreError> {
    let said = std::env::var_os(ALLOW_VARIABLE).unwrap_or_default();
    let allowances =
        Allowances::parse(&said.to_string_lossy()).map_err(|word| RestoreError::UnknownAllowance(word.to_string()))?;
    // A daemon of an earlier version understands a request without allowances.
    Ok(if allowances == Allowances::default() { Request::Restore } else { Request::RestoreAllowing(allowances) })
}

/// Connects as the process did, and tells the daemon which connection this one replaces. The daemon sends no answer: the
/// process would read it.
fn reattach(restore: u64, dumped: &RestoredSocket) -> Result<UnixStream, RestoreError> {
    let socket = daemon::connect(Path::new(&dumped.path))?;
    let cookie = socket::cookie(socket.as_raw_fd())?;
    let request = Request::Reattach { restore, socket: dumped.id, cookie };
    daemon::open(&socket, &request, &[]).map_err(DaemonError::from)?;
    Ok(socket)
}

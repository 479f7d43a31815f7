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
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rekindle_wire::control::{ALLOW_VARIABLE, Allowances, Failure, Reply, Request, RestoredSocket};

use crate::answer::{Answer, Exit};
use crate::daemon::{self, Daemon, DaemonError};
use crate::host::{self, Inventory};
use crate::{log, tree};

/// The image that the daemon has written into CRIU's image directory.
const MANIFEST: &std::ffi::CStr = c"rekindle.img";

/// Where a restore stands.
#[derive(Debug, Default)]
pub enum Restore {
    /// Nothing in it is ours.
    #[default]
    Foreign,
    /// Workers are loading, and CRIU rebuilds the processes.
    Loading(Loading),
    /// The rings are open.
    Open,
    /// The processes have been killed.
    Failed,
}

/// A restore that has clients of ours in it.
#[derive(Debug)]
pub struct Loading {
    daemon: Daemon,
    restore: u64,
    sockets: Vec<RestoredSocket>,
    /// What RESUME_DEVICES_LATE was called for, the root first.
    seen: Vec<i32>,
}

impl Restore {
    /// init(RESTORE). An error fails the restore before anything runs.
    pub fn begin() -> Result<Self, String> {
        let inventory = host::take_from_inventory();
        let Some(image_dir) = host::image_dir() else {
            return match inventory {
                Inventory::Names => Err("CRIU has no image directory".into()),
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
                return Err("the processes used a GPU, but rekindle.img is missing from the image directory".into());
            }
            (_, Err(reason)) => return Err(reason),
            (_, Ok(true)) => {}
        }
        let path = daemon::socket_path();
        let (daemon, reply) = Daemon::session(&path, &request()?, image_dir)
            .map_err(|error| format!("the processes used a GPU and cannot be restored: {error}"))?;
        match reply {
            Reply::Prepared { restore, sockets } => {
                Ok(Self::Loading(Loading { daemon, restore, sockets, seen: Vec::new() }))
            }
            Reply::NotOurs if inventory != Inventory::Names => Ok(Self::Foreign),
            other => Err(daemon::out_of_turn(other)),
        }
    }

    /// RESTORE_UNIX_SK: the new socket. Runs in the process that is being restored, in its namespaces; the session's
    /// descriptor is closed there and its number may be taken.
    pub fn socket(&self, id: u32) -> Result<Answer, String> {
        let Self::Loading(loading) = self else {
            return Ok(Answer::NotOurs);
        };
        let Some(dumped) = loading.sockets.iter().find(|socket| socket.id == id) else {
            return Ok(Answer::NotOurs);
        };
        let socket = reattach(loading.restore, dumped).map_err(|error| error.to_string())?;
        Ok(Answer::Descriptor(socket.into_raw_fd()))
    }

    /// RESUME_DEVICES_LATE: the process is complete, but stopped.
    pub fn resume(&mut self, pid: i32) -> Result<Answer, String> {
        let loading = match self {
            Self::Loading(loading) => loading,
            Self::Failed => return Err("killed with the others".into()),
            Self::Foreign | Self::Open => return Ok(Answer::NotOurs),
        };
        loading.seen.push(pid);
        let reason = match loading.daemon.ask(&Request::Resume { pid }) {
            Ok(Reply::Resumed { ours, open }) => {
                if open {
                    *self = Self::Open;
                }
                return Ok(Answer::ours(ours));
            }
            Ok(other) => daemon::out_of_turn(other),
            Err(error) => error.to_string(),
        };
        let reason = format!("process {pid} cannot go on: {reason}; killing the restored processes");
        self.kill(pid);
        Err(reason)
    }

    /// Kills all of a restore of ours. CRIU only logs what goes wrong in RESUME_DEVICES_LATE and lets the process run.
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
            // Another plugin may have answered for them.
            Self::Loading(_) => {
                "CRIU has not asked about all restored GPU processes: the restore is given up, and they are killed"
            }
        };
        log::error(reason);
        Exit::Process
    }
}

fn has_manifest(image_dir: RawFd) -> Result<bool, String> {
    // SAFETY: a descriptor and a string that ends in NUL.
    if unsafe { libc::faccessat(image_dir, MANIFEST.as_ptr(), libc::F_OK, 0) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::NotFound => Ok(false),
        _ => Err(format!("rekindle.img cannot be looked for: {error}")),
    }
}

/// The first request, with what whoever restores allows.
fn request() -> Result<Request, String> {
    let said = std::env::var_os(ALLOW_VARIABLE).unwrap_or_default();
    let allowances = Allowances::parse(&said.to_string_lossy()).map_err(|word| {
        format!(
            "{ALLOW_VARIABLE} allows \"{word}\", which is nothing: there are {} and {}",
            Allowances::OTHER_DRIVER,
            Allowances::OTHER_GPU
        )
    })?;
    // What allows nothing a daemon of an earlier version understands too.
    Ok(if allowances == Allowances::default() { Request::Restore } else { Request::RestoreAllowing(allowances) })
}

/// Connects as the process did, and tells the daemon whose place this connection takes. No answer is read: what came
/// would be read by the process.
fn reattach(restore: u64, dumped: &RestoredSocket) -> Result<UnixStream, DaemonError> {
    let socket = daemon::connect(Path::new(&dumped.path))?;
    let cookie =
        daemon::cookie(socket.as_raw_fd()).map_err(|reason| DaemonError::Refused(Failure::internal(reason)))?;
    let request = Request::Reattach { restore, socket: dumped.id, cookie };
    daemon::open(&socket, &request, &[])?;
    Ok(socket)
}

//! Files that clients have mapped and register: their workers get them from the daemon, since a process cannot open a file by its
//! mapping, and the file may have no name any more.
//!
//! ```text
//!   interposer: a second mapping of the file in the pinned window ── Register ─► daemon: /proc/PID/map_files ── Registers ─► worker
//!               ── PINNED_MAP (ring) ─────────────────────────────────────────────────────────────────────────────────────► maps it
//! ```

use rekindle_wire::control::{Failing, FailureKind, Reply};
use thiserror::Error;
use tracing::debug;

use super::Daemon;
use super::process::Process;
use super::restore::{SharedError, registered};
use super::worker::WorkerError;

/// Why a worker does not get a file.
#[derive(Debug, Error)]
enum RegisterError {
    #[error("the asking process has no worker")]
    NoClient,
    #[error("its worker is of a version that maps no files")]
    OldWorker,
    #[error(transparent)]
    File(#[from] SharedError),
    #[error(transparent)]
    Worker(#[from] WorkerError),
}

impl Failing for RegisterError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::NoClient | Self::OldWorker => FailureKind::Refused,
            Self::File(error) => error.kind(),
            Self::Worker(error) => error.kind(),
        }
    }
}

/// Gives the process's worker the file that the process has mapped there.
pub(super) fn register(daemon: &Daemon, process: Process, address: u64, size: u64) -> Reply {
    match try_register(daemon, process, address, size) {
        Ok(()) => Reply::Registered,
        Err(error) => {
            // The program goes on: copies of the memory go through the bounce buffer.
            debug!(pid = process.pid, "no file for the worker: {error}");
            Reply::Failed(error.into())
        }
    }
}

fn try_register(daemon: &Daemon, process: Process, address: u64, size: u64) -> Result<(), RegisterError> {
    let clients = daemon.clients.registry.clients();
    let client = clients.iter().find(|it| it.process == process).ok_or(RegisterError::NoClient)?;
    if !client.worker.registers_files() {
        return Err(RegisterError::OldWorker);
    }
    client.wait_while_it_loads();
    let (pinned, file) = registered(process.pid, address, size)?;
    Ok(client.worker.registers(pinned, &file)?)
}

//! Records of which worker serves which client, for the daemon that takes the place of this one.
//!
//! ```text
//!   a client gets a worker ──► recorded ──► gone, when the worker is
//!                                 │
//!                                 └ a file: the next daemon compares with it what a worker says of itself
//! ```
//!
//! A worker that offers itself to the next daemon may be under its client's control, and claim another client. Dumps of that
//! other process would then have the wrong GPU state. So the record of the daemon that gave the worker away decides: the
//! worker, the client, and the connection between them, by the kernel's number for that socket (`SO_COOKIE`), which is the same
//! in every process. A worker without a record has no client.

use std::fs;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tracing::{debug, warn};

use super::process::Process;
use super::{state_dir, sys};

/// The folder in the state directory.
const FOLDER: &str = "workers";
/// The version of the files' content.
const VERSION: u32 = 1;

/// The records.
pub(crate) struct WorkerRecords {
    dir: PathBuf,
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    version: u32,
    boot: String,
    worker: Process,
    client: Process,
    /// `SO_COOKIE` of the worker's end of their connection.
    connection: u64,
}

/// Why the daemon does not believe a worker.
#[derive(Debug, Error)]
pub(crate) enum RecordError {
    #[error("the previous daemon has left no record of worker {0}: restart its program")]
    None(i32),
    #[error("the worker belongs to process {}, and claims to belong to process {}", .recorded.pid, .said.pid)]
    OtherClient { recorded: Process, said: Process },
    #[error("the descriptor that the worker sent is not its connection with the client")]
    OtherConnection,
    #[error("cannot examine the connection that the worker sent: {0}")]
    Io(#[from] io::Error),
}

impl WorkerRecords {
    /// Opens the records in the daemon's state directory. Records of workers that are gone are removed.
    pub(crate) fn open(state_dir: &Path) -> Self {
        let records = Self { dir: state_dir.join(FOLDER) };
        let entries = records.are_ours().then(|| fs::read_dir(&records.dir));
        for entry in entries.into_iter().flatten().flatten().flatten() {
            let path = entry.path();
            if !records.read(&path).is_some_and(|it| it.worker.is_alive())
                && let Err(error) = fs::remove_file(&path)
            {
                warn!("cannot remove {}: {error}", path.display());
            }
        }
        records
    }

    /// Records a worker that is about to serve a client over this connection; the worker has a copy of it.
    pub(crate) fn keep(&self, worker: Process, client: Process, connection: BorrowedFd<'_>) {
        let record = || {
            let (boot, connection) = (state_dir::boot()?, sys::cookie(connection)?);
            let record = Record { version: VERSION, boot, worker, client, connection };
            state_dir::make(&self.dir)?;
            state_dir::write(&self.path(worker), &serde_json::to_vec(&record)?)
        };
        if let Err(error) = record() {
            let (pid, dir) = (client.pid, self.dir.display());
            warn!(pid, "the next daemon will not take over this worker: cannot record the worker in {dir}: {error}");
        }
    }

    /// Whether a worker serves this client over this connection.
    pub(crate) fn check(
        &self,
        worker: Process,
        client: Process,
        connection: BorrowedFd<'_>,
    ) -> Result<(), RecordError> {
        let record = self.are_ours().then(|| self.read(&self.path(worker))).flatten();
        let record = record.filter(|it| it.worker == worker).ok_or(RecordError::None(worker.pid))?;
        if record.client != client {
            return Err(RecordError::OtherClient { recorded: record.client, said: client });
        }
        if record.connection != sys::cookie(connection)? {
            return Err(RecordError::OtherConnection);
        }
        Ok(())
    }

    /// Removes the record of a worker that has died.
    pub(crate) fn forget(&self, worker: Process) {
        let path = self.path(worker);
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => debug!("cannot remove {}: {error}", path.display()),
        }
    }

    /// Whether only this user can have written the records.
    fn are_ours(&self) -> bool {
        self.dir.parent().is_some_and(state_dir::is_ours) && state_dir::is_ours(&self.dir)
    }

    fn path(&self, worker: Process) -> PathBuf {
        self.dir.join(format!("{}-{}.json", worker.pid, worker.start))
    }

    /// Reads a record. A malformed record, or one from before the machine's last start, counts as none.
    fn read(&self, path: &Path) -> Option<Record> {
        let record: Record = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        (record.version == VERSION && record.boot == state_dir::boot().ok()?).then_some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;
    use std::process::Command;

    fn sleep() -> (std::process::Child, Process) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::with_pid(child.id() as i32).unwrap();
        (child, process)
    }

    #[test]
    fn a_worker_is_its_recorded_clients_by_their_connection_and_nobody_elses() {
        let dir = tempfile::tempdir().unwrap();
        let records = WorkerRecords::open(dir.path());
        let (mut child, worker) = sleep();
        let own = Process::with_pid(std::process::id() as i32).unwrap();
        let (connection, another) = UnixStream::pair().unwrap();
        let check = |records: &WorkerRecords, client, fd: &UnixStream| {
            records.check(worker, client, fd.as_fd()).map_err(|error| error.to_string())
        };
        assert!(check(&records, own, &connection).unwrap_err().contains("no record"));
        records.keep(worker, own, connection.as_fd());
        let path = dir.path().join("workers");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        // Another daemon opens the records, and the connection is a copy.
        let records = WorkerRecords::open(dir.path());
        check(&records, own, &connection.try_clone().unwrap()).unwrap();
        assert!(check(&records, own, &another).unwrap_err().contains("not its connection"));
        assert!(check(&records, worker, &connection).unwrap_err().contains("claims to belong to"));
        let later = Process { start: own.start + 1, ..own };
        assert!(check(&records, later, &connection).is_err());
        // Records in a folder that others can write do not count.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o722)).unwrap();
        assert!(check(&records, own, &connection).unwrap_err().contains("no record"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        check(&records, own, &connection).unwrap();

        child.kill().unwrap();
        child.wait().unwrap();
        let records = WorkerRecords::open(dir.path());
        assert_eq!(fs::read_dir(&path).unwrap().count(), 0, "of a worker that is gone");
        records.forget(worker);
        records.keep(own, own, connection.as_fd());
        records.forget(own);
        assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
    }
}

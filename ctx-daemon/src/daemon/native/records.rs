//! Records of the processes that this daemon has locked, for the daemon that takes its place: whatever was locked is unlocked.
//!
//! ```text
//!   before the lock ──► recorded ──► removed when the process is unlocked, or gone
//!                          │
//!                          └ a file: the next daemon gives such a process its GPU memory back, and unlocks it
//! ```
//!
//! A record also names the helper that called the driver: it may be in the middle of that call when its daemon is killed, and the
//! next daemon waits for its end.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tracing::warn;

use super::super::process::Process;
use super::super::state_dir;

/// The folder in the state directory.
const FOLDER: &str = "natives";
/// The version of the files' content.
const VERSION: u32 = 1;

/// The records.
pub(crate) struct Records {
    dir: PathBuf,
}

/// A process that was locked.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub(super) struct Record {
    version: u32,
    boot: String,
    pub(super) process: Process,
    /// The helper that called the driver last.
    pub(super) helper: Option<Process>,
    /// The process's name, for messages.
    pub(super) name: String,
}

impl Records {
    pub(super) fn open(state_dir: &Path) -> Self {
        Self { dir: state_dir.join(FOLDER) }
    }

    /// Records a process that is about to be locked, or is.
    pub(super) fn keep(&self, process: Process, helper: Option<Process>, name: &str) -> io::Result<()> {
        let record = Record { version: VERSION, boot: state_dir::boot()?, process, helper, name: name.to_owned() };
        state_dir::make(&self.dir)?;
        state_dir::write(&self.path(process), &serde_json::to_vec(&record)?)
    }

    /// Removes the record of a process that is unlocked, or gone.
    pub(super) fn forget(&self, process: Process) {
        let path = self.path(process);
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => warn!("cannot remove {}: {error}", path.display()),
        }
    }

    /// The records that the daemon before has left. Those that mean nothing any more are removed.
    pub(super) fn left(&self) -> Vec<Record> {
        if !self.dir.parent().is_some_and(state_dir::is_ours) || !state_dir::is_ours(&self.dir) {
            return Vec::new();
        }
        let (mut found, boot) = (Vec::new(), state_dir::boot().ok());
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let record = fs::read(entry.path()).ok().and_then(|it| serde_json::from_slice::<Record>(&it).ok());
            let record = record.filter(|it| it.version == VERSION && Some(&it.boot) == boot.as_ref());
            match record.filter(|it| it.process.is_alive()) {
                Some(record) => found.push(record),
                None => {
                    if let Err(error) = fs::remove_file(entry.path()) {
                        warn!("cannot remove {}: {error}", entry.path().display());
                    }
                }
            }
        }
        found
    }

    fn path(&self, process: Process) -> PathBuf {
        self.dir.join(format!("{}-{}.json", process.pid, process.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_locked_is_found_until_it_is_forgotten_or_gone() {
        let dir = tempfile::tempdir().unwrap();
        let own = Process::with_pid(std::process::id() as i32).unwrap();
        let gone = Process { start: own.start + 1, ..own };
        let records = Records::open(dir.path());
        assert_eq!(records.left(), []);
        records.keep(own, Some(own), "train").unwrap();
        records.keep(gone, None, "train").unwrap();
        fs::write(dir.path().join(FOLDER).join("torn.json"), "{").unwrap();
        let left = Records::open(dir.path()).left();
        assert_eq!(left.iter().map(|it| (it.process, it.helper)).collect::<Vec<_>>(), [(own, Some(own))]);
        assert_eq!(fs::read_dir(dir.path().join(FOLDER)).unwrap().count(), 1, "the others are removed");
        records.forget(own);
        records.forget(own);
        assert_eq!(records.left(), []);
    }
}

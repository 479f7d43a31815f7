//! The decisions about migrations, for later questions and for the daemon that takes the place of this one.
//!
//! Each is a file in the state directory. A decision is durable before anybody hears of it. Files of a time before the machine
//! has started mean nothing any more: the trees have ended with the machine.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tracing::warn;

use super::super::process::Process;
use super::super::state_dir;

/// The version of the files' content.
const VERSION: u32 = 1;
/// The longest name.
const LONGEST: usize = 64;

/// The records.
pub(super) struct Records {
    dir: PathBuf,
}

/// Where a tree goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Decision {
    /// That was not decided when this was written.
    Undecided,
    /// Here.
    Kept,
    /// Elsewhere.
    HandedOver,
    /// Here, where it has come from elsewhere.
    Arrived,
}

/// A decision, and whom it is about.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Record {
    version: u32,
    boot: String,
    pub(super) decision: Decision,
    /// The processes that must not go on, or do.
    pub(super) processes: Vec<Process>,
}

/// Whether a migration may have this name.
pub(super) fn is_name(name: &str) -> bool {
    let is_fit = |c: char| c.is_ascii_alphanumeric() || c == '-';
    (1..=LONGEST).contains(&name.len()) && name.chars().all(is_fit)
}

impl Records {
    /// Opens the records of this name in the state directory. Those that mean nothing any more are removed.
    pub(super) fn open(state_dir: &Path, folder: &str) -> Self {
        let records = Self { dir: state_dir.join(folder) };
        for path in records.paths().filter(|it| read(it).is_none()) {
            if let Err(error) = fs::remove_file(&path) {
                warn!("cannot remove {}: {error}", path.display());
            }
        }
        records
    }

    /// Kills processes of trees that were handed over, if they still live.
    pub(super) fn kill_handed_over(&self) {
        for record in self.paths().filter_map(|it| read(&it)).filter(|it| it.decision == Decision::HandedOver) {
            record.processes.iter().rev().for_each(Process::kill);
        }
    }

    /// The files, if nobody else can have written them.
    fn paths(&self) -> impl Iterator<Item = PathBuf> {
        let is_ours = self.dir.parent().is_some_and(state_dir::is_ours) && state_dir::is_ours(&self.dir);
        let entries = is_ours.then(|| fs::read_dir(&self.dir));
        entries.into_iter().flatten().flatten().flatten().map(|it| it.path())
    }

    /// Writes a decision so that it survives this daemon.
    pub(super) fn write(&self, name: &str, decision: Decision, processes: &[Process]) -> io::Result<()> {
        let record = Record { version: VERSION, boot: state_dir::boot()?, decision, processes: processes.to_vec() };
        state_dir::make(&self.dir)?;
        let new = self.path(name).with_extension("new");
        let file = File::create(&new)?;
        serde_json::to_writer(&file, &record)?;
        file.sync_all()?;
        fs::rename(&new, self.path(name))?;
        File::open(&self.dir)?.sync_all()
    }

    /// Removes what a failed [`write`](Self::write) may have left.
    pub(super) fn withdraw(&self, name: &str) {
        if let Err(error) = fs::remove_file(self.path(name))
            && error.kind() != io::ErrorKind::NotFound
        {
            warn!("cannot remove {}, which says that a migration was handed over: {error}", self.path(name).display());
        }
    }

    /// The record of a migration, if it was one of this machine since it has started.
    pub(super) fn read(&self, name: &str) -> Option<Record> {
        is_name(name).then(|| read(&self.path(name)))?
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

/// A record that can be understood and is of this start of the machine.
fn read(path: &Path) -> Option<Record> {
    let record: Record = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    (record.version == VERSION && record.boot == state_dir::boot().ok()?).then_some(record)
}

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

/// The folder in the state directory.
const FOLDER: &str = "migrations";
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
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    version: u32,
    boot: String,
    decision: Decision,
    /// The processes that must not go on.
    processes: Vec<Process>,
}

/// Whether a migration may have this name.
pub(super) fn is_name(name: &str) -> bool {
    let is_fit = |c: char| c.is_ascii_alphanumeric() || c == '-';
    (1..=LONGEST).contains(&name.len()) && name.chars().all(is_fit)
}

impl Records {
    /// Opens the records. Processes of trees that were handed over are killed, if they still live.
    pub(super) fn open(state_dir: &Path) -> Self {
        let records = Self { dir: state_dir.join(FOLDER) };
        let is_ours = state_dir::is_ours(state_dir) && state_dir::is_ours(&records.dir);
        let entries = is_ours.then(|| fs::read_dir(&records.dir));
        for entry in entries.into_iter().flatten().flatten().flatten() {
            let path = entry.path();
            match read(&path) {
                Some(Record { decision: Decision::HandedOver, processes, .. }) => {
                    processes.iter().rev().for_each(Process::kill);
                }
                Some(_) => {}
                None => {
                    if let Err(error) = fs::remove_file(&path) {
                        warn!("cannot remove {}: {error}", path.display());
                    }
                }
            }
        }
        records
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

    /// The decision about a migration, if it was one of this machine since it has started.
    pub(super) fn read(&self, name: &str) -> Option<Decision> {
        is_name(name).then(|| read(&self.path(name)))?.map(|it| it.decision)
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

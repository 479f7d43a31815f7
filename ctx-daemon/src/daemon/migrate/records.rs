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

/// The version of a record's content. A daemon that knows only version 1 would kill processes that stand still, and their engine might
/// start them anew; so records of these have version 2, which it does not act on.
const VERSION: u32 = 1;
const STILL: u32 = 2;
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
    /// Whether they stand still by a SIGSTOP until they go on or are removed by their engine, as containers do.
    #[serde(default)]
    pub(super) still: bool,
    /// Those of them that somebody had stopped before, and that stay so.
    #[serde(default)]
    pub(super) stopped: Vec<Process>,
}

/// What a file says.
enum Found {
    /// A record that can be understood and is of this start of the machine.
    Record(Record),
    /// A record of a newer rekindled. It stays for that one.
    Newer,
    /// Nothing that means anything any more.
    Nothing,
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
        for path in records.paths() {
            match find(&path) {
                Found::Record(_) => {}
                Found::Newer => warn!(
                    "{} is of a newer rekindled: this one does not know what it says of a migration",
                    path.display()
                ),
                Found::Nothing => {
                    if let Err(error) = fs::remove_file(&path) {
                        warn!("cannot remove {}: {error}", path.display());
                    }
                }
            }
        }
        records
    }

    /// Acts for the daemon that has ended: kills processes of trees that were handed over, if they still live, and lets those go on
    /// that stand still undecided. What stands still and was handed over is its engine's to remove, which would start a container
    /// anew that is killed.
    pub(super) fn act_on_what_was_left(&self) {
        for (name, record) in self.all().collect::<Vec<_>>() {
            match (record.decision, record.still) {
                (Decision::HandedOver, false) => record.processes.iter().rev().for_each(Process::kill),
                (Decision::Undecided, true) => {
                    // They go on once: the next daemon must not send them SIGCONT again, whoever has stopped them since.
                    if let Err(error) = self.let_go_on(&name, &record) {
                        warn!(migration = name, "cannot record that it was kept: {error}");
                    }
                }
                _ => {}
            }
        }
    }

    /// What stands still goes on here although it was handed over: somebody knows that it does not go on elsewhere. If this daemon ends
    /// meanwhile, the next one finds it undecided, and goes on with that.
    pub(super) fn take_back(&self, name: &str, record: &Record) -> io::Result<()> {
        self.write_still(name, Decision::Undecided, &record.processes, &record.stopped)?;
        self.let_go_on(name, record)
    }

    /// Lets go on what stands still by this record, but for what had been stopped before, and for what another migration has handed over.
    fn let_go_on(&self, name: &str, record: &Record) -> io::Result<()> {
        let others = self.all().filter(|(other, it)| other != name && it.decision == Decision::HandedOver);
        let handed_over: Vec<_> = others.flat_map(|(_, it)| it.processes).collect();
        let go_on = record.processes.iter().filter(|it| !record.stopped.contains(it) && !handed_over.contains(it));
        go_on.for_each(Process::go_on);
        self.write(name, Decision::Kept, &[])
    }

    /// All migrations that have records, which can be understood.
    fn all(&self) -> impl Iterator<Item = (String, Record)> {
        self.names().filter_map(|name| self.read(&name).map(|record| (name, record)))
    }

    /// The names of the migrations that have records. What a write that was cut off has left is none.
    fn names(&self) -> impl Iterator<Item = String> {
        self.paths().filter_map(|it| it.file_name()?.to_str().map(str::to_owned)).filter(|it| is_name(it))
    }

    /// The files, if nobody else can have written them.
    fn paths(&self) -> impl Iterator<Item = PathBuf> {
        let is_ours = self.dir.parent().is_some_and(state_dir::is_ours) && state_dir::is_ours(&self.dir);
        let entries = is_ours.then(|| fs::read_dir(&self.dir));
        entries.into_iter().flatten().flatten().flatten().map(|it| it.path())
    }

    /// Writes a decision so that it survives this daemon.
    pub(super) fn write(&self, name: &str, decision: Decision, processes: &[Process]) -> io::Result<()> {
        self.write_record(name, decision, processes, None)
    }

    /// The same, of processes that stand still, some of which had been stopped before.
    pub(super) fn write_still(
        &self,
        name: &str,
        decision: Decision,
        processes: &[Process],
        stopped: &[Process],
    ) -> io::Result<()> {
        self.write_record(name, decision, processes, Some(stopped))
    }

    fn write_record(
        &self,
        name: &str,
        decision: Decision,
        processes: &[Process],
        still: Option<&[Process]>,
    ) -> io::Result<()> {
        let version = if still.is_some() { STILL } else { VERSION };
        let (boot, processes) = (state_dir::boot()?, processes.to_vec());
        let stopped = still.unwrap_or_default().to_vec();
        let record = Record { version, boot, decision, processes, still: still.is_some(), stopped };
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

    /// Whether there is a record of a migration, be it one of a newer rekindled.
    pub(super) fn has(&self, name: &str) -> bool {
        is_name(name) && self.path(name).exists()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

/// The record in a file, if it can be understood and is of this start of the machine.
fn read(path: &Path) -> Option<Record> {
    match find(path) {
        Found::Record(record) => Some(record),
        Found::Newer | Found::Nothing => None,
    }
}

fn find(path: &Path) -> Found {
    /// What the records of every version have.
    #[derive(Deserialize)]
    struct Any {
        version: u32,
        boot: String,
    }
    let Ok(content) = fs::read(path) else { return Found::Nothing };
    match (serde_json::from_slice::<Any>(&content), state_dir::boot()) {
        (Ok(any), Ok(boot)) if any.boot == boot && any.version > STILL => Found::Newer,
        (Ok(any), Ok(boot)) if any.boot == boot => {
            serde_json::from_slice(&content).map_or(Found::Nothing, Found::Record)
        }
        _ => Found::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn records_of_older_daemons_are_read_and_those_of_newer_ones_kept() {
        let dir = TempDir::new().unwrap();
        let records = Records::open(dir.path(), "migrations");
        let process = Process::with_pid(std::process::id() as i32).unwrap();
        records.write("moved", Decision::HandedOver, &[process]).unwrap();
        records.write_still("still", Decision::Undecided, &[process], &[]).unwrap();
        let version = |name: &str| {
            let record = fs::read(dir.path().join("migrations").join(name)).unwrap();
            serde_json::from_slice::<serde_json::Value>(&record).unwrap()["version"].as_u64()
        };
        assert_eq!((version("moved"), version("still")), (Some(1), Some(2)));
        // As a daemon wrote it that knew nothing of what stands still.
        let boot = state_dir::boot().unwrap();
        let old = serde_json::json!({"version": 1, "boot": boot, "decision": "kept", "processes": []});
        fs::write(dir.path().join("migrations/old"), old.to_string()).unwrap();
        let newer = serde_json::json!({"version": 3, "boot": boot, "decided": "otherwise"});
        fs::write(dir.path().join("migrations/newer"), newer.to_string()).unwrap();
        let other = serde_json::json!({"version": 2, "boot": "another", "decision": "kept", "processes": []});
        fs::write(dir.path().join("migrations/before"), other.to_string()).unwrap();
        let records = Records::open(dir.path(), "migrations");
        let old = records.read("old").unwrap();
        assert_eq!((old.decision, old.still), (Decision::Kept, false));
        assert!(records.read("still").is_some_and(|it| it.still && it.processes == [process]));
        assert!(records.read("newer").is_none() && dir.path().join("migrations/newer").exists());
        assert!(!dir.path().join("migrations/before").exists());
    }
    #[test]
    fn what_stood_still_goes_on_once_and_not_at_all_if_it_was_handed_over_later() {
        let dir = TempDir::new().unwrap();
        let records = Records::open(dir.path(), "migrations");
        let sleepers = [(); 3].map(|()| std::process::Command::new("sleep").arg("1000").spawn().unwrap());
        let [kept, moved, cut_off] = sleepers.each_ref().map(|it| Process::with_pid(it.id() as i32).unwrap());
        let stop = |process: Process| {
            process.stop();
            while !process.is_stopped() {
                std::thread::yield_now();
            }
        };
        [kept, moved, cut_off].into_iter().for_each(stop);
        records.write_still("earlier", Decision::Undecided, &[kept, moved], &[]).unwrap();
        records.write_still("later", Decision::HandedOver, &[moved], &[]).unwrap();
        // A daemon that ended before it gave the file its name.
        records.write_still("begun", Decision::Undecided, &[cut_off], &[]).unwrap();
        fs::rename(dir.path().join("migrations/begun"), dir.path().join("migrations/begun.new")).unwrap();
        records.act_on_what_was_left();
        while kept.is_stopped() {
            std::thread::yield_now();
        }
        assert!(moved.is_stopped() && cut_off.is_stopped());
        stop(kept);
        records.act_on_what_was_left();
        let earlier = records.read("earlier").unwrap();
        assert_eq!((earlier.decision, earlier.processes.len()), (Decision::Kept, 0));
        assert!(records.read("later").is_some_and(|it| it.decision == Decision::HandedOver));
        // A SIGCONT that was sent takes effect before the sender hears anything else.
        assert!(kept.is_stopped() && moved.is_stopped());
        for mut sleeper in sleepers {
            sleeper.kill().unwrap();
            sleeper.wait().unwrap();
        }
    }
}

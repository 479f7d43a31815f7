//! The record of a protection: what the next supervisor has to know if this one is killed.
//!
//! The file is replaced by a rename, after its content is on the disk. So it is whole at any moment: as it was before, or as
//! it is now.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::container::Container;
use crate::copies::Copies;
use crate::failures::Failures;
use crate::levels::Level;
use crate::phase::{Phase, Rules};
use crate::process::Process;
use crate::shelf::Shelf;

/// The version of the file. A field that an older reader may ignore does not raise it.
const VERSION: u32 = 2;
/// The version of a file about processes, which releases read that know nothing of containers.
const OF_PROCESSES: u32 = 1;
/// The record's name in the folder of its protection.
const FILE: &str = "record.json";
/// The name that it has while it is written.
const NEW: &str = "record.json.new";
/// No record is longer: one image takes less than a KiB.
const LONGEST: u64 = 16 << 20;
/// The most events that are kept.
const EVENTS: usize = 50;

/// What is wrong with a record.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// It cannot be read.
    #[error("cannot read {file}: {source}")]
    Read {
        /// The file.
        file: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// It cannot be written.
    #[error("cannot write {file}: {source}; the record is as it was before")]
    Write {
        /// The file.
        file: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// It is none.
    #[error("{file} is no record of a protection: {source}")]
    Parse {
        /// The file.
        file: PathBuf,
        /// The reason.
        source: serde_json::Error,
    },
    /// A later release has written it.
    #[error("{file} has version {found}, and this release reads version {VERSION}: use the release that wrote it")]
    Version {
        /// The file.
        file: PathBuf,
        /// Its version.
        found: u32,
    },
}

/// The interval that the user wants.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Every {
    /// The one that loses least.
    Auto,
    /// So many seconds.
    Seconds(f64),
}

/// What the user has asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Wishes {
    /// The interval.
    pub every: Every,
    /// How many images are kept.
    pub keep: usize,
    /// How many images one may build on before it is flattened. 0: every image stands alone.
    pub chain: usize,
    /// Where the images are.
    pub images: PathBuf,
    /// The stores that get images, the nearest first.
    pub levels: Vec<Level>,
    /// The file with the stores' key.
    pub key: Option<PathBuf>,
    /// The mean time between failures of one GPU, in seconds.
    pub mtbf: f64,
    /// After how many seconds an image is verified again.
    #[serde(default = "verify_every")]
    pub verify_every: f64,
    /// What to do when the job ends.
    pub rules: Rules,
    /// More arguments of `rekindle checkpoint`.
    pub checkpoint: Vec<String>,
    /// More arguments of `rekindle restore`.
    pub restore: Vec<String>,
    /// The daemon's socket.
    pub socket: PathBuf,
    /// The command, as arguments of `rekindle run`; empty where a process or a container was given.
    pub command: Vec<String>,
    /// The container; none where processes are protected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<Container>,
}

/// What was wished before it could be said.
const fn verify_every() -> f64 {
    3600.0
}

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Happened {
    /// Milliseconds since 1970.
    pub ms: u64,
    /// What.
    pub what: String,
}

/// What the next supervisor has to know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// What the user has asked for.
    pub wishes: Wishes,
    /// Where the protection is.
    pub phase: Phase,
    /// The root of the job's processes, once it runs: of a container, its first process.
    pub job: Option<Process>,
    /// The boot of the machine in which the job runs.
    pub boot: String,
    /// The processes of the job when they were seen last.
    #[serde(default)]
    pub tree: Vec<Process>,
    /// Whether a supervisor has begun to remove what is left of the container that has failed.
    #[serde(default)]
    pub removing: bool,
    /// GPUs that the job has memory on.
    #[serde(default)]
    pub gpus: usize,
    /// The images.
    pub shelf: Shelf,
    /// Their copies in stores.
    #[serde(default)]
    pub copies: Copies,
    /// How often the job fails.
    pub failures: Failures,
    /// Restores that were made.
    pub restores: u32,
    /// Seconds of the last restore.
    #[serde(default)]
    pub restore_seconds: f64,
    /// Checkpoints that have failed since the last good one.
    pub failed_checkpoints: u32,
    /// The last things that have happened, oldest first.
    pub events: Vec<Happened>,
}

impl Record {
    /// The record of a protection that begins.
    #[must_use]
    pub fn new(wishes: Wishes, job: Option<Process>, boot: String) -> Self {
        Self {
            version: if wishes.container.is_some() { VERSION } else { OF_PROCESSES },
            wishes,
            phase: Phase::default(),
            job,
            boot,
            tree: job.into_iter().collect(),
            removing: false,
            gpus: 1,
            shelf: Shelf::default(),
            copies: Copies::default(),
            failures: Failures::default(),
            restores: 0,
            restore_seconds: 0.0,
            failed_checkpoints: 0,
            events: Vec::new(),
        }
    }

    /// Reads the record in a folder; `None` if there is none.
    ///
    /// # Errors
    /// It cannot be read, or is none.
    pub fn read(folder: &Path) -> Result<Option<Self>, RecordError> {
        let file = folder.join(FILE);
        let mut bytes = Vec::new();
        match File::open(&file).and_then(|it| it.take(LONGEST).read_to_end(&mut bytes)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(RecordError::Read { file, source }),
            Ok(_) => {}
        }
        let parsed = |source| RecordError::Parse { file: file.clone(), source };
        let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(parsed)?;
        match value.get("version").and_then(serde_json::Value::as_u64) {
            Some(found) if found > u64::from(VERSION) => {
                return Err(RecordError::Version { file, found: u32::try_from(found).unwrap_or(u32::MAX) });
            }
            _ => {}
        }
        serde_json::from_value(value).map(Some).map_err(parsed)
    }

    /// Replaces the record in a folder.
    ///
    /// # Errors
    /// It cannot be written, on a full disk for example. The former record is there.
    pub fn write(&self, folder: &Path) -> Result<(), RecordError> {
        let (new, file) = (folder.join(NEW), folder.join(FILE));
        let written = || -> io::Result<()> {
            let bytes = serde_json::to_vec_pretty(self)?;
            let mut out = File::create(&new)?;
            out.write_all(&bytes)?;
            out.sync_all()?;
            fs::rename(&new, &file)?;
            File::open(folder)?.sync_all()
        };
        written().map_err(|source| {
            let _ = fs::remove_file(&new);
            RecordError::Write { file: file.clone(), source }
        })
    }

    /// Notes something that has happened.
    pub fn note(&mut self, ms: u64, what: String) {
        let excess = (self.events.len() + 1).saturating_sub(EVENTS);
        self.events.drain(..excess);
        self.events.push(Happened { ms, what });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::levels::Level;
    use crate::phase::{Ending, Event};

    fn record() -> Record {
        let rules = Rules { restore: true, nonzero_fails: false, limit: 3 };
        let wishes = Wishes {
            every: Every::Seconds(2.5),
            keep: 3,
            chain: 4,
            images: "/images".into(),
            levels: vec![Level { url: "/store".into(), keep: Some(2), every: None }],
            key: None,
            mtbf: 3600.0,
            verify_every: 60.0,
            rules,
            checkpoint: vec!["--at-moment".into()],
            restore: Vec::new(),
            socket: "/s".into(),
            command: Vec::new(),
            container: None,
        };
        Record::new(wishes, Some(Process { pid: 7, started: 9 }), "boot".into())
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Record::read(folder.path()).unwrap(), None);
        let mut record = record();
        for phase in [
            Phase::default(),
            Phase::Restoring { fruitless: 1, failed: 2 },
            Phase::Over { ending: Ending::Exited(3) },
            Phase::GivenUp { why: "x".into() },
            Phase::Stopped,
        ] {
            record.phase = phase;
            record.note(1, "something".into());
            record.write(folder.path()).unwrap();
            assert_eq!(Record::read(folder.path()).unwrap().as_ref(), Some(&record));
        }
        assert!(!folder.path().join(NEW).exists());
        let next = Phase::default().next(Event::Stop, record.wishes.rules);
        assert_eq!(next, Phase::Stopped);
    }

    #[test]
    fn a_record_that_was_cut_or_is_of_a_later_release_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        record().write(folder.path()).unwrap();
        let file = folder.path().join(FILE);
        let written = fs::read_to_string(&file).unwrap();
        for length in 0..written.len() {
            fs::write(&file, &written[..length]).unwrap();
            let error = Record::read(folder.path()).unwrap_err();
            assert!(matches!(error, RecordError::Parse { .. }), "{length}: {error}");
        }
        fs::write(&file, written.replacen("\"version\": 1", "\"version\": 3", 1)).unwrap();
        assert!(matches!(Record::read(folder.path()), Err(RecordError::Version { found: 3, .. })));
    }

    #[test]
    fn a_record_of_a_container_is_refused_by_a_release_that_would_take_it_for_one_of_a_process() {
        let folder = tempfile::tempdir().unwrap();
        let mut wishes = record().wishes;
        assert_eq!(Record::new(wishes.clone(), None, String::new()).version, 1);
        wishes.container = Some(Container { id: "f0".into(), name: "job".into(), podman: None });
        let mut record = Record::new(wishes, None, String::new());
        assert_eq!(record.version, 2);
        record.phase = Phase::Over { ending: Ending::ByUser };
        record.write(folder.path()).unwrap();
        assert_eq!(Record::read(folder.path()).unwrap(), Some(record));
    }

    #[test]
    fn a_record_that_cannot_be_written_leaves_the_former_one() {
        let folder = tempfile::tempdir().unwrap();
        let mut record = record();
        record.write(folder.path()).unwrap();
        // A directory is in the place of the new file.
        fs::create_dir(folder.path().join(NEW)).unwrap();
        let former = record.clone();
        record.restores = 5;
        assert!(matches!(record.write(folder.path()), Err(RecordError::Write { .. })));
        assert_eq!(Record::read(folder.path()).unwrap(), Some(former));
    }

    #[test]
    fn a_record_of_an_earlier_release_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let mut record = record();
        let image = crate::shelf::Image {
            number: 1,
            on: None,
            standing: crate::shelf::Standing::Good,
            began_ms: 5,
            cost: None,
            verified_ms: 0,
        };
        record.shelf.add(image);
        record.write(folder.path()).unwrap();
        let file = folder.path().join(FILE);
        let mut value: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        value["wishes"].as_object_mut().unwrap().remove("verify_every").unwrap();
        value["shelf"][0].as_object_mut().unwrap().remove("verified_ms").unwrap();
        fs::write(&file, serde_json::to_vec(&value).unwrap()).unwrap();
        record.wishes.verify_every = 3600.0;
        assert_eq!(Record::read(folder.path()).unwrap(), Some(record));
    }

    #[test]
    fn only_the_last_events_are_kept() {
        let mut record = record();
        (0..200).for_each(|at| record.note(at, String::new()));
        assert_eq!((record.events.len(), record.events[0].ms), (EVENTS, 150));
    }
}

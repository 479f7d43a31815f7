//! The folder of a protection.
//!
//! ```text
//!   NAME/record.json      what the supervisor knows (rekindle-protect's `record`)
//!        job.json         the process that a command was started as; made once, by that process
//!        ended.json       how the job ended, as its guard has seen it
//!        out, err         what the job of a command writes
//!        stop             the user's wish to stop the protection
//!        guard, lock      locks of the guard and of the supervisor, with their numbers
//!        supervisor.log   what both have to say
//!        images/          the images, unless they are elsewhere
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use rekindle_protect::{Ending, Process, Record};
use rustix::fs::{FlockOperation, flock};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// The images' names begin with this, and the number follows.
const IMAGE: &str = "image-";
/// The longest name of a protection.
const LONGEST_NAME: usize = 100;

/// The end of a job, as its guard has seen it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Ended {
    pub(super) pid: i32,
    pub(super) ending: Ending,
}

/// The folder of a protection.
#[derive(Clone, Debug)]
pub(super) struct Folder {
    path: PathBuf,
}

impl Folder {
    /// The folder with this path.
    pub(super) fn at(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// The folder of a protection with this name.
    pub(super) fn named(all: &Path, name: &str) -> Result<Self, Failure> {
        let plain = |it: char| it.is_ascii_alphanumeric() || "._+-@:".contains(it);
        if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(plain) || name.starts_with(['-', '.']) {
            return Err(Failure::usage(anyhow!(
                "{name:?} is no name of a protection: it has letters, digits and ._+-@: and begins with none of - and ."
            )));
        }
        Ok(Self { path: all.join(name) })
    }

    /// The folders of all protections, by name.
    pub(super) fn all(all: &Path) -> Result<Vec<Self>, Failure> {
        let entries = match fs::read_dir(all) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(|| format!("cannot list {}", all.display()))?,
        };
        let mut found: Vec<_> = entries.flatten().map(|it| Self { path: it.path() }).collect();
        found.retain(|it| it.path.is_dir());
        found.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(found)
    }

    /// Keeps others from making protections, as long as the returned file is open: nobody else protects meanwhile what this one looks
    /// for. What this program starts does not get it.
    pub(super) fn lock_all(all: &Path) -> anyhow::Result<File> {
        let said = || format!("cannot lock {}", all.display());
        fs::DirBuilder::new().recursive(true).mode(0o700).create(all).with_context(said)?;
        let dir = File::open(all).with_context(said)?;
        flock(&dir, FlockOperation::LockExclusive).with_context(said)?;
        Ok(dir)
    }

    /// The protection among all that has not come to its end and for which this holds. Fails if there is a record that cannot be read,
    /// since it may be the one.
    pub(super) fn protecting(all: &Path, is_of: impl Fn(&Record) -> bool) -> Result<Option<Self>, Failure> {
        for folder in Self::all(all)? {
            let record = Record::read(&folder.path);
            let record = record.map_err(|error| {
                let why = format!("cannot tell whether it is protected already, as {}", folder.name());
                Failure::refused(anyhow::Error::from(error).context(why))
            })?;
            if record.is_some_and(|it| !it.phase.is_final() && is_of(&it)) {
                return Ok(Some(folder));
            }
        }
        Ok(None)
    }

    /// Makes the folder, for its owner only, with the record. Fails if there is one of that name.
    pub(super) fn make(&self, record: &Record) -> Result<(), Failure> {
        let said = || format!("cannot make {}", self.path.display());
        if let Some(parent) = self.path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(parent).with_context(said)?;
        }
        match fs::DirBuilder::new().mode(0o700).create(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let name = self.name();
                return Err(Failure::refused(anyhow!(
                    "there is a protection {name}: choose another name with --name, or remove it with `rekindle protect --forget {name}`"
                )));
            }
            made => made.with_context(said)?,
        }
        let made = make_images_dir(&record.wishes.images).and_then(|()| Ok(record.write(&self.path)?));
        if made.is_err() {
            let _ = fs::remove_dir_all(&self.path);
        }
        Ok(made?)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The protection's name.
    pub(super) fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The record.
    pub(super) fn record(&self) -> Result<Record, Failure> {
        let record = Record::read(&self.path).map_err(anyhow::Error::from)?;
        record.ok_or_else(|| Failure::refused(anyhow!("there is no protection {}", self.name())))
    }

    /// Waits until nobody else is the guard, and becomes it.
    pub(super) fn lock_guard(&self) -> anyhow::Result<File> {
        lock(&self.path.join("guard"))
    }

    /// Waits until no other supervisor is at work, nor anything that one has started, and becomes it.
    pub(super) fn lock(&self) -> anyhow::Result<File> {
        lock(&self.path.join("lock"))
    }

    /// The guard's number, if there is a guard.
    pub(super) fn guard(&self) -> Option<i32> {
        holder(&self.path.join("guard"))
    }

    /// The supervisor's number, if there is one.
    pub(super) fn supervisor(&self) -> Option<i32> {
        holder(&self.path.join("lock"))
    }

    /// Notes the process that the command is. Fails if it was started before.
    pub(super) fn claim_job(&self, process: Process) -> anyhow::Result<()> {
        let own = self.path.join(format!("job.json.{}", process.pid));
        fs::write(&own, serde_json::to_vec(&process)?).with_context(|| format!("cannot write {}", own.display()))?;
        // A link appears whole, and only once.
        let linked = fs::hard_link(&own, self.path.join("job.json"));
        let _ = fs::remove_file(&own);
        linked.context("the command was started before")
    }

    /// The process that the command was started as.
    pub(super) fn job(&self) -> Option<Process> {
        read(&self.path.join("job.json"))
    }

    /// Notes how the job has ended.
    pub(super) fn note_end(&self, ended: Ended) -> anyhow::Result<()> {
        let new = self.path.join("ended.json.new");
        fs::write(&new, serde_json::to_vec(&ended)?)?;
        Ok(fs::rename(&new, self.path.join("ended.json"))?)
    }

    /// How the job has ended since [`forget_end`](Self::forget_end), if the guard has seen it.
    pub(super) fn end_of(&self, pid: i32) -> Option<Ending> {
        read(&self.path.join("ended.json")).filter(|it: &Ended| it.pid == pid).map(|it| it.ending)
    }

    /// Forgets how the job has ended: another process is about to have its number.
    pub(super) fn forget_end(&self) {
        let _ = fs::remove_file(self.path.join("ended.json"));
    }

    /// Where the job of a command writes its output and its errors.
    pub(super) fn console(&self) -> [PathBuf; 2] {
        ["out", "err"].map(|it| self.path.join(it))
    }

    /// Wishes that the protection be stopped.
    pub(super) fn wish_stop(&self) -> anyhow::Result<()> {
        let file = self.path.join("stop");
        File::create(&file).map(drop).with_context(|| format!("cannot make {}", file.display()))
    }

    /// Whether somebody wishes that.
    pub(super) fn stop_is_wished(&self) -> bool {
        self.path.join("stop").exists()
    }

    /// Opens the log, for appending.
    pub(super) fn log(&self) -> anyhow::Result<File> {
        append(&self.path.join("supervisor.log"))
    }

    /// Removes the folder.
    pub(super) fn remove(&self) -> anyhow::Result<()> {
        fs::remove_dir_all(&self.path).with_context(|| format!("cannot remove {}", self.path.display()))
    }
}

/// The directory of an image.
pub(super) fn image_dir(images: &Path, number: u64) -> PathBuf {
    images.join(format!("{IMAGE}{number:06}"))
}

/// The numbers of the images in a directory, sorted.
pub(super) fn image_numbers(images: &Path) -> Vec<u64> {
    let entries = fs::read_dir(images).into_iter().flatten().flatten();
    let number = |it: fs::DirEntry| it.file_name().to_str()?.strip_prefix(IMAGE)?.parse().ok();
    let mut found: Vec<u64> = entries.filter_map(number).collect();
    found.sort_unstable();
    found
}

/// Opens a file for appending. CRIU does not ask that such a file has the length at a restore that it had at the dump.
pub(super) fn append(path: &Path) -> anyhow::Result<File> {
    OpenOptions::new().append(true).create(true).open(path).with_context(|| format!("cannot open {}", path.display()))
}

/// Makes the directory of the images. What is in one that was there before would be taken for images of this job.
fn make_images_dir(images: &Path) -> anyhow::Result<()> {
    let made = || {
        if let Some(parent) = images.parent() {
            fs::create_dir_all(parent)?;
        }
        // Images have the memory of the job. One that is there keeps its rights.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(images)
    };
    made().with_context(|| format!("cannot make {}", images.display()))?;
    match fs::read_dir(images).with_context(|| format!("cannot list {}", images.display()))?.next() {
        None => Ok(()),
        Some(_) => Err(anyhow!("{} is not empty: name another directory with --dir", images.display())),
    }
}

fn lock(path: &Path) -> anyhow::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    let mut file = file.with_context(|| format!("cannot open {}", path.display()))?;
    flock(&file, FlockOperation::LockExclusive).with_context(|| format!("cannot lock {}", path.display()))?;
    // Only for people and for tests. On a full disk there is no number.
    let _ = file.set_len(0).and_then(|()| write!(file, "{}", std::process::id()));
    Ok(file)
}

fn holder(path: &Path) -> Option<i32> {
    let file = File::open(path).ok()?;
    // Whoever gets the lock sees that nobody has it.
    if flock(&file, FlockOperation::NonBlockingLockShared).is_ok() {
        return None;
    }
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_name_is_one_part_of_a_path() {
        for good in ["train-812", "a.b", "x@y:z+1"] {
            assert_eq!(Folder::named(Path::new("/p"), good).unwrap().name(), good);
        }
        for bad in ["", "..", ".x", "-x", "a/b", "a b", "a\n", &"x".repeat(101)] {
            assert!(Folder::named(Path::new("/p"), bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_command_is_started_once() {
        let place = tempfile::tempdir().unwrap();
        let folder = Folder::at(place.path());
        let [one, other] = [1, 2].map(|pid| Process { pid, started: 5 });
        folder.claim_job(one).unwrap();
        assert!(folder.claim_job(other).is_err());
        assert_eq!(folder.job(), Some(one));
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
    }

    #[test]
    fn the_end_of_another_process_is_not_the_end_of_the_job() {
        let place = tempfile::tempdir().unwrap();
        let folder = Folder::at(place.path());
        assert_eq!(folder.end_of(7), None);
        folder.note_end(Ended { pid: 7, ending: Ending::Signalled(9) }).unwrap();
        assert_eq!((folder.end_of(7), folder.end_of(8)), (Some(Ending::Signalled(9)), None));
        folder.forget_end();
        assert_eq!(folder.end_of(7), None);
    }

    #[test]
    fn a_lock_names_who_has_it_as_long_as_somebody_has_it() {
        let place = tempfile::tempdir().unwrap();
        let folder = Folder::at(place.path());
        assert_eq!(folder.supervisor(), None);
        let lock = folder.lock().unwrap();
        assert_eq!(folder.supervisor(), Some(std::process::id().cast_signed()));
        // What a supervisor starts has the lock too.
        let with_child = lock.try_clone().unwrap();
        drop(lock);
        assert!(folder.supervisor().is_some());
        drop(with_child);
        assert_eq!((folder.supervisor(), folder.guard()), (None, None));
    }

    #[test]
    fn protections_are_made_one_after_the_other() {
        let place = tempfile::tempdir().unwrap();
        let all = place.path().join("all");
        let lock = Folder::lock_all(&all).unwrap();
        let other = File::open(&all).unwrap();
        let is_free = || flock(&other, FlockOperation::NonBlockingLockExclusive).is_ok();
        assert!(!is_free());
        drop(lock);
        assert!(is_free());
    }

    #[test]
    fn a_record_that_cannot_be_read_may_be_any() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("job");
        fs::create_dir(&folder).unwrap();
        assert!(Folder::protecting(place.path(), |_| true).unwrap().is_none(), "it has no record");
        fs::write(folder.join("record.json"), "{").unwrap();
        let why = Folder::protecting(place.path(), |_| true).unwrap_err().to_string();
        assert!(why.contains("protected already, as job"), "{why}");
    }

    #[test]
    fn images_are_for_their_owner_only() {
        let place = tempfile::tempdir().unwrap();
        let images = place.path().join("dir/job");
        make_images_dir(&images).unwrap();
        assert_eq!(fs::metadata(&images).unwrap().permissions().mode() & 0o777, 0o700);
        fs::write(images.join("other"), "").unwrap();
        assert!(make_images_dir(&images).is_err());
    }

    #[test]
    fn images_are_found_by_their_numbers() {
        let place = tempfile::tempdir().unwrap();
        for name in ["image-000002", "image-1000000", "image-x", "other", "image-000001"] {
            fs::create_dir(place.path().join(name)).unwrap();
        }
        assert_eq!(image_numbers(place.path()), [1, 2, 1_000_000]);
        assert!(image_dir(place.path(), 2).exists());
    }
}

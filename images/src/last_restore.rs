//! What the last restore of an image was like: `rekindle-restore.json`, which the daemon makes beside the image when the processes
//! are about to run, and writes when all of it is loaded.
//!
//! ```text
//!   {"version": 1, "manifest": CHECKSUM, "restore": {...}}
//! ```
//!
//! The file is for people. Nothing depends on it, so a file that cannot be read, of a later version, or of another image
//! counts as none. It is not synced: one that a crash has cut short cannot be read. Whoever writes last wins.

use std::fmt;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};

use serde::{Deserialize, Serialize};

use crate::ImageError;
use crate::dir::ImageDir;
use crate::hash::Checksum;
use crate::inspect::{Duration, Rate, Size, plain, utc};
use crate::limits::MAX_LAST_RESTORE;
use crate::names::{LAST_RESTORE, last_restore_temporary};
use crate::sys;

/// The version of the file. A field that an older reader may ignore does not raise it.
const VERSION: u32 = 1;

/// The last restore of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LastRestore {
    /// When all content was loaded, in seconds since 1970.
    pub time: u64,
    /// The name of the machine.
    pub host: String,
    /// Version of the product that restored the image.
    pub rekindle_version: String,
    /// Nanoseconds from CRIU's first request until the processes could run.
    pub running_ns: u64,
    /// Nanoseconds from CRIU's first request until all content was loaded.
    pub loaded_ns: u64,
    /// How long each part took until the processes could run. The parts follow each other.
    pub phases: Vec<RestorePhase>,
    /// The processes that use a GPU.
    pub clients: Vec<RestoredClient>,
}

/// A part of a restore.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RestorePhase {
    /// Its name.
    pub name: String,
    /// Nanoseconds.
    pub duration_ns: u64,
    /// Bytes that it handled; 0 where a number of bytes means nothing.
    pub bytes: u64,
}

/// A process that was restored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RestoredClient {
    /// Its pid as it sees itself.
    pub namespace_pid: u32,
    /// Its command's name.
    pub command: String,
    /// Bytes of GPU memory.
    pub bytes: u64,
    /// Bytes among them that were zeros, which were set and not copied.
    pub zero_bytes: u64,
    /// Bytes among them that were on the GPU already, and were copied there.
    pub copied_bytes: u64,
    /// How long each step of its load took. Processes load at the same time.
    pub phases: Vec<RestorePhase>,
}

/// The content of the file.
#[derive(Serialize, Deserialize)]
struct Stored<T> {
    version: u32,
    manifest: String,
    restore: T,
}

/// The part of the file that stays as it is in every version.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl LastRestore {
    /// Reads the account of the last restore of the image with this manifest. `None` where there is none, or none that can be
    /// read.
    #[must_use]
    pub fn read(dir: &ImageDir, manifest: Checksum) -> Option<Self> {
        let (file, length) = dir.open_file(LAST_RESTORE).ok()??;
        if length > MAX_LAST_RESTORE {
            return None;
        }
        // Bounded by the check above.
        let mut text = vec![0; length as usize];
        file.read_exact_at(&mut text, 0).ok()?;
        let Versioned { version } = serde_json::from_slice(&text).ok()?;
        if version > VERSION {
            return None;
        }
        let stored: Stored<Self> = serde_json::from_slice(&text).ok()?;
        (stored.manifest == manifest.to_string()).then_some(stored.restore)
    }

    /// Makes the file beside an image, in place of a former one, while the directory is in use. It has no account yet, and counts
    /// as none.
    ///
    /// # Errors
    /// [`ImageError::NoSpace`], [`ImageError::Io`]: the directory is as it was.
    pub fn begin(dir: &ImageDir) -> Result<Account, ImageError> {
        let temporary = last_restore_temporary(u64::from_le_bytes(sys::random_bytes()?));
        let (dir, file) = (dir.try_clone()?, dir.create_file(&temporary)?);
        match dir.rename(&temporary, LAST_RESTORE) {
            Ok(()) => Ok(Account { dir, file }),
            Err(error) => {
                // The first failure says more. A file that stays is removed by the next writer.
                let _ = dir.remove(&temporary);
                Err(error)
            }
        }
    }
}

/// The file of a restore that goes on. A directory that is being removed, or gets another image, meanwhile gets no file any more:
/// whatever is written goes into the file that was made, with a name or without.
#[derive(Debug)]
pub struct Account {
    dir: ImageDir,
    file: File,
}

impl Account {
    /// Writes the account of the image with this manifest.
    ///
    /// # Errors
    /// [`ImageError::NoSpace`], [`ImageError::Io`]: the file counts as none.
    pub fn write(mut self, restore: &LastRestore, manifest: Checksum) -> Result<(), ImageError> {
        let stored = Stored { version: VERSION, manifest: manifest.to_string(), restore };
        let text =
            serde_json::to_vec_pretty(&stored).map_err(|error| ImageError::io("write", LAST_RESTORE, error.into()))?;
        self.file.write_all(&text).map_err(|error| ImageError::write(LAST_RESTORE, text.len() as u64, error))
    }

    /// Removes the file, if it still has its name: the restore has failed.
    pub fn remove(self) {
        let same = |now: (File, u64)| {
            let (now, own) = (now.0.metadata().ok()?, self.file.metadata().ok()?);
            ((now.dev(), now.ino()) == (own.dev(), own.ino())).then_some(())
        };
        if self.dir.open_file(LAST_RESTORE).ok().flatten().and_then(same).is_some() {
            // A file that stays counts as none.
            let _ = self.dir.remove(LAST_RESTORE);
        }
    }
}

impl fmt::Display for LastRestore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\nlast restore  {} on {}, rekindle {}: the processes ran after {}, and all memory was loaded after {}",
            utc(self.time),
            plain(&self.host),
            plain(&self.rekindle_version),
            Duration(self.running_ns),
            Duration(self.loaded_ns)
        )?;
        write_phases(f, &self.phases, "  ")?;
        for client in &self.clients {
            write!(f, "  {} (pid {}): {}", plain(&client.command), client.namespace_pid, Size(client.bytes))?;
            for (bytes, what) in [(client.zero_bytes, "zero"), (client.copied_bytes, "on the GPU before")] {
                if bytes > 0 {
                    write!(f, ", {} of that {what}", Size(bytes))?;
                }
            }
            writeln!(f)?;
            write_phases(f, &client.phases, "    ")?;
        }
        Ok(())
    }
}

fn write_phases(f: &mut fmt::Formatter<'_>, phases: &[RestorePhase], indent: &str) -> fmt::Result {
    for phase in phases {
        let duration = Duration(phase.duration_ns).to_string();
        write!(f, "{indent}{:<10}{duration:>12}", plain(&phase.name))?;
        match phase.bytes {
            0 => writeln!(f)?,
            bytes => writeln!(f, "  {}, {}", Size(bytes), Rate(bytes, phase.duration_ns))?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;
    use crate::{Image, ImageWriter, sample};

    fn restore(loaded_ns: u64) -> LastRestore {
        let phase = |name: &str, duration_ns, bytes| RestorePhase { name: name.to_owned(), duration_ns, bytes };
        LastRestore {
            time: 1_767_225_599,
            host: "node7\u{1b}[2J".to_owned(),
            rekindle_version: "0.1.0".to_owned(),
            running_ns: 412_000_000,
            loaded_ns,
            phases: vec![phase("check", 1_200_000, 0), phase("workers", 300_000, 0)],
            clients: vec![RestoredClient {
                namespace_pid: 7,
                command: "python".to_owned(),
                bytes: 3 << 30,
                zero_bytes: 1 << 30,
                copied_bytes: 2 << 30,
                phases: vec![phase("replay", 20_000_000, 0), phase("content", 1_000_000_000, 2 << 30)],
            }],
        }
    }

    fn image() -> (tempfile::TempDir, Image) {
        let dir = tempfile::tempdir().unwrap();
        sample::write(dir.path());
        let image = Image::open(dir.path()).unwrap();
        (dir, image)
    }

    fn write(restore: &LastRestore, image: &Image) {
        LastRestore::begin(image.dir()).unwrap().write(restore, image.manifest_hash()).unwrap();
    }

    fn file(dir: &Path) -> std::path::PathBuf {
        dir.join(LAST_RESTORE)
    }

    #[test]
    fn what_was_written_is_read_and_the_last_one_wins() {
        let (dir, image) = image();
        assert_eq!(image.last_restore(), None);
        let before = sample::names(dir.path());
        for loaded in [2_000_000_000, 1_000_000_000] {
            write(&restore(loaded), &image);
            assert_eq!(image.last_restore(), Some(restore(loaded)));
        }
        assert_eq!(sample::names(dir.path()).len(), before.len() + 1, "nothing else is left");
        assert!(Image::open(dir.path()).unwrap().verify(|_| ()).is_good());
    }

    #[test]
    fn what_cannot_be_read_counts_as_none() {
        let (dir, image) = image();
        write(&restore(1), &image);
        let good = fs::read_to_string(file(dir.path())).unwrap();
        let newer = good.replace("\"version\": 1", "\"version\": 2");
        let other = good.replace(&image.manifest_hash().to_string(), &"0".repeat(32));
        let long = format!("{good}{}", " ".repeat(MAX_LAST_RESTORE as usize));
        for bad in ["", "{", "[1]", "{\"version\": 1}", "\0\0\0\0", &newer, &other, &long, &good[..good.len() - 3]] {
            fs::write(file(dir.path()), bad).unwrap();
            assert_eq!(image.last_restore(), None, "{}", &bad[..bad.len().min(200)]);
        }
        // What this version does not know is ignored, and what is missing has a default.
        let sparse = format!(
            "{{\"version\": 1, \"later\": [], \"manifest\": \"{}\", \"restore\": {{\"loaded_ns\": 3, \"more\": 1}}}}",
            image.manifest_hash()
        );
        fs::write(file(dir.path()), sparse).unwrap();
        assert_eq!(image.last_restore(), Some(LastRestore { loaded_ns: 3, ..LastRestore::default() }));
    }

    #[test]
    fn a_link_is_neither_followed_nor_written_through() {
        let (dir, image) = image();
        let elsewhere = dir.path().join("elsewhere");
        write(&restore(1), &image);
        fs::rename(file(dir.path()), &elsewhere).unwrap();
        symlink(&elsewhere, file(dir.path())).unwrap();
        assert_eq!(image.last_restore(), None);
        let before = fs::read(&elsewhere).unwrap();
        write(&restore(2), &image);
        assert_eq!((fs::read(&elsewhere).unwrap(), image.last_restore()), (before, Some(restore(2))));
    }

    #[test]
    fn another_image_in_the_directory_does_not_get_it_and_the_next_dump_removes_it() {
        let (dir, image) = image();
        write(&restore(1), &image);
        // An image that is given up leaves the one that is there with its last restore.
        let again = || {
            let options = crate::CreateOptions { replace: true, ..sample::options() };
            let writer = ImageWriter::create(ImageDir::open(dir.path()).unwrap(), options).unwrap();
            let manifest = sample::fill_with(&writer, b"another!").unwrap();
            (writer, manifest)
        };
        again().0.abort().unwrap();
        assert_eq!(image.last_restore(), Some(restore(1)));
        let [late, given_up] = [(); 2].map(|()| LastRestore::begin(image.dir()).unwrap());
        let (writer, manifest) = again();
        writer.commit(manifest).unwrap();
        assert!(!file(dir.path()).exists());
        // Daemons that restored the former image come late.
        late.write(&restore(1), image.manifest_hash()).unwrap();
        given_up.remove();
        assert!(!file(dir.path()).exists());
        let late = LastRestore::begin(image.dir()).unwrap();
        let removed = ImageDir::open(dir.path()).unwrap();
        ImageWriter::remove_image(removed).unwrap();
        late.write(&restore(1), image.manifest_hash()).unwrap();
        assert_eq!(sample::names(dir.path()), [""; 0]);
    }

    #[test]
    fn a_restore_that_fails_removes_its_own_file_only() {
        let (dir, image) = image();
        let first = LastRestore::begin(image.dir()).unwrap();
        assert_eq!(image.last_restore(), None);
        let second = LastRestore::begin(image.dir()).unwrap();
        first.remove();
        assert!(file(dir.path()).exists());
        second.remove();
        assert!(!file(dir.path()).exists());
    }

    #[test]
    fn without_its_image_it_makes_no_directory_an_image() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(file(dir.path()), "{}").unwrap();
        assert_eq!(Image::open(dir.path()).unwrap_err().kind(), crate::ErrorKind::NotAnImage);
        ImageWriter::remove_image(ImageDir::open(dir.path()).unwrap()).unwrap();
        assert!(!file(dir.path()).exists());
    }

    #[test]
    fn it_is_shown_with_each_part() {
        let expected = "\nlast restore  2025-12-31T23:59:59Z on node7?[2J, rekindle 0.1.0: the processes ran after 412.0 ms, \
                        and all memory was loaded after 1.50 s\n  check           1.2 ms\n  workers       300.0 us\n  \
                        python (pid 7): 3.0 GiB, 1.0 GiB of that zero, 2.0 GiB of that on the GPU before\n    replay         20.0 ms\n    \
                        content         1.00 s  2.0 GiB, 2.1 GB/s\n";
        assert_eq!(restore(1_500_000_000).to_string(), expected);
    }
}

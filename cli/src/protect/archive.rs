//! The archive of a container as an image of its protection: one file in the image's directory, and its hash beside it.
//!
//! ```text
//!   images/image-000003/container.tar          as podman has exported it: `rekindle restore --import` restores it by hand
//!                       container.tar.hash     of the whole file, after the image in it was verified
//!          unpacked/                           what is being verified, for as long as that takes
//! ```
//!
//! Only the first look at an archive unpacks it, just after podman has made it: what a crash of the machine leaves has no hash, and is
//! no image. What the hash says later covers podman's parts too.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rekindle_stores::ARCHIVE;
use xxhash_rust::xxh3::Xxh3;

const HASH: &str = "container.tar.hash";
/// Where an archive is unpacked, beside the images.
const UNPACKED: &str = "unpacked";
/// The directory in an archive that has CRIU's images and Rekindle's.
const CHECKPOINT: &str = "checkpoint";
/// What podman needs beside it to make the container again.
const PODMANS: [&str; 2] = ["config.dump", "spec.dump"];
/// Two blocks of zeros are the end of an archive.
const END: usize = 1024;
/// What GNU tar says of an archive that is not as it was written. Whatever else it says, of a full disk for example, is no word on the
/// archive.
const DAMAGE: [&str; 5] = [
    "Unexpected EOF in archive",
    "does not look like a tar archive",
    "Skipping to next header",
    "Not found in archive",
    "value expected",
];

/// What is wrong with an archive, or in the way of looking at it.
#[derive(Debug)]
pub(super) enum Wrong {
    /// Its bytes are not those that were written.
    Damaged(String),
    Failed(String),
}

/// The archive of the image in this directory.
pub(super) fn archive(dir: &Path) -> PathBuf {
    dir.join(ARCHIVE)
}

/// Makes the directory of an image, for its owner only.
pub(super) fn make_dir(dir: &Path) -> Result<(), Wrong> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|error| failed("cannot make a directory for the archive", &error))
}

/// Whether the archive has its hash. None if it was never verified.
pub(super) fn has_its_hash(dir: &Path) -> Option<Result<(), Wrong>> {
    let noted = match fs::read(dir.join(HASH)) {
        Ok(noted) => hash_in(&noted)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => return Some(Err(failed("cannot read the hash of the archive", &error))),
    };
    Some(match hash(&archive(dir)) {
        Ok(found) if found == noted => Ok(()),
        Ok(_) => Err(Wrong::Damaged("the archive has another hash than when it was made".to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(Wrong::Damaged("the archive is not there any more".to_owned()))
        }
        Err(error) => Err(failed("cannot read the archive", &error)),
    })
}

/// Takes the hash of a damaged archive along to the copy that has come from a store, so that the copy has to be the same. Without it,
/// the copy is verified like an archive that was just made.
pub(super) fn hand_hash_on(from: &Path, to: &Path) -> Result<(), Wrong> {
    let handed = || match fs::read(from.join(HASH)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(noted) => hash_in(&noted).map_or(Ok(()), |hash| write_hash(to, &hash)),
    };
    handed().map_err(|error| failed("cannot copy the hash of the archive", &error))
}

/// The hash in its file. None if the file has none, as after a crash of the machine.
fn hash_in(noted: &[u8]) -> Option<String> {
    let hash = std::str::from_utf8(noted).ok()?.strip_suffix('\n')?;
    (hash.len() == 32 && hash.bytes().all(|it| it.is_ascii_hexdigit())).then(|| hash.to_owned())
}

/// Writes the hash, so that it is whole on the disk or not there.
fn write_hash(dir: &Path, hash: &str) -> io::Result<()> {
    let new = dir.join(HASH).with_extension("new");
    let mut file = File::create(&new)?;
    writeln!(file, "{hash}")?;
    file.sync_all()?;
    fs::rename(&new, dir.join(HASH))?;
    File::open(dir)?.sync_all()
}

/// Notes the hash of an archive that was verified, after both are on the disk.
pub(super) fn note_hash(dir: &Path) -> Result<(), Wrong> {
    let noted = || {
        let path = archive(dir);
        let hash = hash(&path)?;
        File::open(&path)?.sync_all()?;
        write_hash(dir, &hash)
    };
    noted().map_err(|error| failed("cannot note the hash of the archive", &error))
}

/// The image of an archive, unpacked for as long as this value lives.
#[derive(Debug)]
pub(super) struct Unpacked(PathBuf);

impl Unpacked {
    /// Unpacks the image in the archive of a directory. `lock` is held until tar has ended.
    pub(super) fn of(dir: &Path, lock: File) -> Result<Self, Wrong> {
        let unpacked = Self(dir.with_file_name(UNPACKED));
        let has_its_end = has_its_end(&archive(dir)).map_err(|error| failed("cannot read the archive", &error))?;
        if !has_its_end {
            return Err(Wrong::Damaged("the archive was cut off".to_owned()));
        }
        // Of a supervisor that was killed.
        let _ = fs::remove_dir_all(&unpacked.0);
        make_dir(&unpacked.0)?;
        let mut tar = Command::new("tar");
        tar.env("LC_ALL", "C").args(["--extract", "--file"]).arg(archive(dir)).arg("--directory").arg(&unpacked.0);
        let output =
            tar.arg(CHECKPOINT).args(PODMANS).stdin(lock).stdout(Stdio::null()).stderr(Stdio::piped()).output();
        let output = output.map_err(|error| failed("cannot run tar", &error))?;
        if output.status.success() {
            return Ok(unpacked);
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let first = said.lines().next().unwrap_or("tar fails");
        let why = format!("cannot unpack the archive: {first}");
        Err(if DAMAGE.iter().any(|it| said.contains(it)) { Wrong::Damaged(why) } else { Wrong::Failed(why) })
    }

    /// The directory of the image.
    pub(super) fn image(&self) -> PathBuf {
        self.0.join(CHECKPOINT)
    }
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        // What is left is removed before the next one.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Whether an archive ends as a whole one does. Of one that was cut between two files, tar complains not.
fn has_its_end(path: &Path) -> io::Result<bool> {
    let mut file = File::open(path)?;
    let mut end = [1; END];
    if file.metadata()?.len() < END as u64 {
        return Ok(false);
    }
    file.seek(SeekFrom::End(-(END as i64)))?;
    file.read_exact(&mut end)?;
    Ok(end.iter().all(|it| *it == 0))
}

fn hash(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hash = Xxh3::new();
    let mut block = vec![0; 1 << 20];
    loop {
        match file.read(&mut block)? {
            0 => return Ok(format!("{:032x}", hash.digest128())),
            read => hash.update(&block[..read]),
        }
    }
}

fn failed(what: &str, error: &io::Error) -> Wrong {
    Wrong::Failed(format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, PermissionsExt};

    use super::*;

    /// An archive with an image, in the directory of an image.
    fn packed(images: &Path) -> PathBuf {
        let (source, dir) = (images.join("source"), images.join("image-000001"));
        fs::create_dir_all(source.join(CHECKPOINT)).unwrap();
        fs::create_dir(&dir).unwrap();
        fs::write(source.join(CHECKPOINT).join("inventory.img"), vec![7; 50_000]).unwrap();
        for name in ["ctr.log", "config.dump", "spec.dump"] {
            fs::write(source.join(name), "said").unwrap();
        }
        // Two pages of zeros, as memory has them, are no end either.
        fs::write(source.join(CHECKPOINT).join("pages.img"), vec![0; 8192]).unwrap();
        let mut tar = Command::new("tar");
        tar.arg("-cf")
            .arg(archive(&dir))
            .arg("-C")
            .arg(&source)
            .args(["--sort=name", "ctr.log", CHECKPOINT])
            .args(PODMANS);
        assert!(tar.status().unwrap().success());
        dir
    }

    fn lock() -> File {
        File::open("/dev/null").unwrap()
    }

    #[test]
    fn an_archive_is_unpacked_for_a_look_at_its_image() {
        let images = tempfile::tempdir().unwrap();
        let dir = packed(images.path());
        let unpacked = Unpacked::of(&dir, lock()).unwrap();
        let image = unpacked.image();
        assert_eq!(fs::read(image.join("inventory.img")).unwrap(), vec![7; 50_000]);
        let unpacked_dir = images.path().join(UNPACKED);
        assert!(!unpacked_dir.join("ctr.log").exists(), "only what is needed");
        assert_eq!(fs::metadata(&unpacked_dir).unwrap().permissions().mode() & 0o777, 0o700);
        drop(unpacked);
        assert!(!image.exists());
        // What a supervisor has left that was killed is in nobody's way.
        fs::create_dir_all(images.path().join(UNPACKED).join("left")).unwrap();
        let unpacked = Unpacked::of(&dir, lock()).unwrap();
        assert!(!images.path().join(UNPACKED).join("left").exists());
        drop(unpacked);
    }

    #[test]
    fn a_copy_of_a_damaged_archive_has_to_have_its_hash() {
        let images = tempfile::tempdir().unwrap();
        let dir = packed(images.path());
        note_hash(&dir).unwrap();
        let copy = images.path().join("copy");
        make_dir(&copy).unwrap();
        fs::copy(archive(&dir), archive(&copy)).unwrap();
        fs::write(archive(&dir), "damaged").unwrap();
        hand_hash_on(&dir, &copy).unwrap();
        assert!(matches!(has_its_hash(&copy), Some(Ok(()))));
        File::options().append(true).open(archive(&copy)).unwrap().write_all(&[0]).unwrap();
        assert!(matches!(has_its_hash(&copy), Some(Err(Wrong::Damaged(_)))));
        // Where the hash is gone with the archive, the copy is verified as if podman had just made it.
        fs::remove_dir_all(&dir).unwrap();
        fs::remove_file(copy.join(HASH)).unwrap();
        hand_hash_on(&dir, &copy).unwrap();
        assert!(has_its_hash(&copy).is_none());
    }

    #[test]
    fn damage_is_told_from_what_hinders() {
        let images = tempfile::tempdir().unwrap();
        let dir = packed(images.path());
        assert!(has_its_hash(&dir).is_none(), "nobody has verified it");
        note_hash(&dir).unwrap();
        assert!(matches!(has_its_hash(&dir), Some(Ok(()))));
        let whole = fs::read(archive(&dir)).unwrap();
        // In podman's part, which no image knows.
        File::options().write(true).open(archive(&dir)).unwrap().write_all_at(b"S", whole.len() as u64 - 1).unwrap();
        assert!(matches!(has_its_hash(&dir), Some(Err(Wrong::Damaged(_)))));
        for length in [0, 100, 512, 600, 1024, 30_000] {
            fs::write(archive(&dir), &whole[..length]).unwrap();
            assert!(matches!(has_its_hash(&dir), Some(Err(Wrong::Damaged(_)))), "{length}");
            let found = Unpacked::of(&dir, lock());
            assert!(matches!(found, Err(Wrong::Damaged(_))), "{length}: {found:?}");
        }
        // Between two files, just behind the zeros of the one before.
        let next = whole.windows(11).position(|it| it == b"config.dump").unwrap();
        assert!(whole[..next].ends_with(&[0; END]));
        fs::write(archive(&dir), &whole[..next]).unwrap();
        let found = Unpacked::of(&dir, lock());
        assert!(matches!(&found, Err(Wrong::Damaged(why)) if why.contains("Not found in archive")), "{found:?}");
        // What a crash of the machine leaves: the length is right, and the tail was not written.
        let mut zeros = whole.clone();
        zeros[30_000..].fill(0);
        fs::write(archive(&dir), &zeros).unwrap();
        assert!(matches!(has_its_hash(&dir), Some(Err(Wrong::Damaged(_)))));
        fs::write(archive(&dir), &whole).unwrap();
        fs::write(images.path().join(UNPACKED), "in the way").unwrap();
        let found = Unpacked::of(&dir, lock());
        assert!(matches!(found, Err(Wrong::Failed(_))), "{found:?}");
        fs::remove_file(archive(&dir)).unwrap();
        assert!(matches!(has_its_hash(&dir), Some(Err(Wrong::Damaged(_)))));
    }
}

//! A dump on disk, and damage to it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use xxhash_rust::xxh3::xxh3_128;

use crate::Result;
use crate::app::Identity;

/// The manifest.
pub const MANIFEST: &str = "rekindle.img";
/// The commit record.
pub const COMMIT: &str = "rekindle.commit";
/// The offset of the format version in the manifest and the commit record: a little-endian u32 behind the magic bytes.
const VERSION_AT: u64 = 8;
/// The size of the checksum at the end of both files, which covers all preceding bytes.
const CHECKSUM: usize = 16;

/// CRIU's image directory.
#[derive(Clone, Debug)]
pub struct Image {
    /// The directory.
    pub dir: PathBuf,
    /// The program that was dumped.
    pub app: Identity,
    /// The program's processes, the root first.
    pub tree: Vec<i32>,
    /// The number of bytes that the program had written to stdout by the dump.
    pub written: u64,
}

impl Image {
    /// The names of Rekindle's files in the directory, sorted.
    pub fn files(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name.starts_with("rekindle") {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// The name of the image's only, or first, file of this kind: `rekindle-data`, `rekindle-code`.
    pub fn file(&self, kind: &str) -> Result<String> {
        let files = self.files()?;
        files.into_iter().find(|name| name.starts_with(kind)).with_context(|| format!("the image has no {kind} file"))
    }

    /// The path of a file of the image.
    pub fn path(&self, file: &str) -> PathBuf {
        self.dir.join(file)
    }

    /// Checks that the program had not yet written all of its output when it was dumped. `all` is the complete output.
    pub fn must_be_of_the_middle(&self, all: &str) -> Result {
        let name = &self.app.name;
        ensure!(self.written < all.len() as u64, "{name} was dumped too late: make it run longer");
        Ok(())
    }

    /// Copies the image to a new directory, to be damaged there.
    pub fn copy(&self, dir: PathBuf) -> Result<Self> {
        fs::create_dir(&dir)?;
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            fs::copy(entry.path(), dir.join(entry.file_name()))?;
        }
        Ok(Self { dir, ..self.clone() })
    }

    /// Flips one bit of the byte at `at`.
    pub fn flip(&self, file: &str, at: u64) -> Result {
        let file = open(&self.path(file))?;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at)?;
        file.write_all_at(&[byte[0] ^ 0x10], at)?;
        Ok(())
    }

    /// Cuts off the last byte of a file.
    pub fn truncate(&self, file: &str) -> Result {
        let file = open(&self.path(file))?;
        let length = file.metadata()?.len();
        ensure!(length > 0, "an empty file cannot be truncated");
        file.set_len(length - 1)?;
        Ok(())
    }

    /// Removes a file.
    pub fn remove(&self, file: &str) -> Result {
        Ok(fs::remove_file(self.path(file))?)
    }

    /// Raises the format version in the manifest or the commit record to one that does not exist yet, and corrects the
    /// checksum, so that the file has no other defect. Returns the new version.
    pub fn age_into_the_future(&self, file: &str) -> Result<u32> {
        let path = self.path(file);
        let mut bytes = fs::read(&path)?;
        let at = VERSION_AT as usize..VERSION_AT as usize + 4;
        let version: [u8; 4] = bytes.get(at.clone()).context("the file is too short")?.try_into()?;
        let version = u32::from_le_bytes(version) + 1;
        bytes[at].copy_from_slice(&version.to_le_bytes());
        let body = bytes.len() - CHECKSUM;
        let checksum = xxh3_128(&bytes[..body]).to_be_bytes();
        bytes[body..].copy_from_slice(&checksum);
        fs::write(&path, bytes)?;
        Ok(version)
    }
}

/// The length of a file in bytes.
pub fn length(path: &Path) -> Result<u64> {
    Ok(path.metadata()?.len())
}

fn open(path: &Path) -> Result<File> {
    File::options().read(true).write(true).open(path).with_context(|| path.display().to_string())
}

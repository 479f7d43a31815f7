//! A disk of a known size, which can be filled.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

use anyhow::ensure;

use crate::Result;

/// A disk. It is unmounted when this is dropped.
#[derive(Debug)]
pub struct SmallDisk {
    /// Where it is mounted.
    pub dir: PathBuf,
}

impl SmallDisk {
    /// Mounts a disk of this many KiB at `dir`, which is made.
    pub fn mount(dir: PathBuf, kib: u64) -> Result<Self> {
        fs::create_dir(&dir)?;
        let size = format!("size={kib}k");
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&dir).status()?;
        ensure!(status.success(), "mount ended with {status}");
        Ok(Self { dir })
    }

    /// Leaves no room on it.
    pub fn fill(&self) -> Result {
        let mut others = fs::File::create(self.others())?;
        let block = [1; 4096];
        loop {
            match others.write_all(&block) {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Takes away what [`SmallDisk::fill`] wrote.
    pub fn make_room(&self) -> Result {
        Ok(fs::remove_file(self.others())?)
    }

    fn others(&self) -> PathBuf {
        self.dir.join("others")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.dir).status();
    }
}

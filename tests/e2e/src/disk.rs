//! A disk of a known size, which can be filled.

use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::ensure;

use crate::Result;

/// A disk. Dropping this value unmounts it.
#[derive(Debug)]
pub struct SmallDisk {
    /// The mount point.
    pub dir: PathBuf,
}

impl SmallDisk {
    /// Creates `dir` and mounts a disk of this many KiB there.
    pub fn mount(dir: PathBuf, kib: u64) -> Result<Self> {
        fs::create_dir(&dir)?;
        let size = format!("size={kib}k");
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&dir).status()?;
        ensure!(status.success(), "mount ended with {status}");
        Ok(Self { dir })
    }

    /// Fills the disk completely.
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

    /// Removes the file that [`SmallDisk::fill`] wrote.
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

/// Whether all of a file has its blocks on the disk, and would survive a power failure. Asks `FIEMAP`, which does not
/// cause a write. `None` where the file system has no `FIEMAP`, or allocates all blocks at once.
pub fn is_written_back(path: &Path) -> Result<Option<bool>> {
    let unwritten = path.with_extension("unwritten");
    fs::write(&unwritten, [1; 1 << 20])?;
    let waits = waits_for_a_place(&unwritten)?;
    fs::remove_file(&unwritten)?;
    Ok(match waits {
        Some(true) => waits_for_a_place(path)?.map(|waits| !waits),
        _ => None,
    })
}

/// Whether the file system has yet to allocate blocks for a part of the file (`linux/fiemap.h`).
fn waits_for_a_place(path: &Path) -> Result<Option<bool>> {
    const FS_IOC_FIEMAP: libc::Ioctl = 0xc020_660b;
    const FIEMAP_EXTENT_DELALLOC: u32 = 4;
    const EXTENTS: usize = 512;
    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct Extent {
        logical: u64,
        physical: u64,
        length: u64,
        reserved: [u64; 2],
        flags: u32,
        reserved_too: [u32; 3],
    }
    #[repr(C)]
    struct Map {
        start: u64,
        length: u64,
        flags: u32,
        mapped: u32,
        count: u32,
        reserved: u32,
        extents: [Extent; EXTENTS],
    }
    let extents = [Extent::default(); EXTENTS];
    let mut map = Map { start: 0, length: u64::MAX, flags: 0, mapped: 0, count: EXTENTS as u32, reserved: 0, extents };
    let file = fs::File::open(path)?;
    // SAFETY: the kernel writes as many extents as there is room for.
    if unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) } != 0 {
        return Ok(None);
    }
    let known = &map.extents[..map.mapped as usize];
    Ok(Some(known.iter().any(|it| it.flags & FIEMAP_EXTENT_DELALLOC != 0)))
}

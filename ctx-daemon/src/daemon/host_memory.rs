//! Files in host memory: the content of suspended clients, and that of warm images. They have no name, and end with the last
//! process that has them open. So nothing is left behind by a client, a worker or a daemon that is killed.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, OnceLock};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen};
use thiserror::Error;
use tracing::info;

use super::{lock, sys};

/// The name of a file in host memory without huge pages, as /proc shows it.
const NAME: &CStr = c"rekindle-content";

/// The part of the available memory that is left free.
const LEFT_FREE: u64 = 16;

/// Makes what the first file would make otherwise.
pub(super) fn prepare() {
    huge_pages();
}

/// Why there is no room.
#[derive(Debug, Error)]
pub(super) enum NoRoom {
    #[error("the host does not tell how much memory is free: {0}")]
    Unknown(#[from] io::Error),
    #[error("only {free} bytes of host memory are free")]
    TooLittle { free: u64 },
}

/// Host memory for files that are being written. As long as this lives nobody else gets what they do not have yet.
#[derive(Debug)]
pub(super) struct Room(u64);

/// The rooms that there are.
#[derive(Default)]
struct Rooms {
    next: u64,
    rooms: BTreeMap<u64, Writing>,
}

struct Writing {
    bytes: u64,
    files: Vec<File>,
}

static ROOMS: Mutex<Rooms> = Mutex::new(Rooms { next: 0, rooms: BTreeMap::new() });

impl Room {
    /// Sets so many bytes aside.
    pub(super) fn new(bytes: u64) -> Result<Self, NoRoom> {
        let mut all = lock(&ROOMS);
        let available = sys::available_memory()?;
        let promised = all.rooms.values().fold(0_u64, |sum, it| sum.saturating_add(it.missing()));
        let free = (available - available / LEFT_FREE).saturating_sub(promised);
        if bytes > free {
            return Err(NoRoom::TooLittle { free });
        }
        all.next += 1;
        let number = all.next;
        all.rooms.insert(number, Writing { bytes, files: Vec::new() });
        Ok(Self(number))
    }

    /// A new file, open for reading and writing.
    pub(super) fn file(&self) -> io::Result<File> {
        let file = File::from(match huge_pages() {
            Some(mount) => unnamed(mount)?,
            None => rustix::fs::memfd_create(NAME, rustix::fs::MemfdFlags::CLOEXEC)?,
        });
        let copy = file.try_clone()?;
        lock(&ROOMS).rooms.entry(self.0).and_modify(|it| it.files.push(copy));
        Ok(file)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        lock(&ROOMS).rooms.remove(&self.0);
    }
}

impl Writing {
    /// The bytes that its files do not have yet.
    fn missing(&self) -> u64 {
        const BLOCK: u64 = 512;
        let has = |file: &File| file.metadata().map_or(0, |it| it.blocks() * BLOCK);
        self.bytes.saturating_sub(self.files.iter().map(has).sum())
    }
}

/// The same file, open for reading only.
pub(super) fn read_only(file: &File) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// A file in a directory that has no name there. Where the file system does not know such files, one whose name is removed.
pub(super) fn unnamed(directory: impl AsFd) -> io::Result<OwnedFd> {
    let directory = directory.as_fd();
    let (flags, mode) = (OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
    match rustix::fs::openat(directory, c".", flags | OFlags::TMPFILE, mode) {
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => {}
        result => return Ok(result?),
    }
    let name = format!(".rekindle-content-{:016x}", sys::random()?);
    let file = rustix::fs::openat(directory, name.as_str(), flags | OFlags::CREATE | OFlags::EXCL, mode)?;
    rustix::fs::unlinkat(directory, name.as_str(), AtFlags::empty())?;
    Ok(file)
}

/// A file system in memory with huge pages, mounted nowhere. From its files content comes back at 43 GB/s, and from a memfd at
/// 6 GB/s (H200). `None` where this process may not mount.
fn huge_pages() -> Option<&'static OwnedFd> {
    static MOUNT: OnceLock<Option<OwnedFd>> = OnceLock::new();
    let mount = || -> rustix::io::Result<OwnedFd> {
        let new = fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        // No limit of its own: whoever makes files looks at what the host has.
        for (option, value) in [(c"huge", c"always"), (c"size", c"0"), (c"mode", c"700")] {
            fsconfig_set_string(&new, option, value)?;
        }
        fsconfig_create(&new)?;
        let attributes =
            MountAttrFlags::MOUNT_ATTR_NOEXEC | MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        fsmount(&new, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    };
    let mounted = || mount().inspect_err(|error| info!("content in host memory gets no huge pages: {error}")).ok();
    MOUNT.get_or_init(mounted).as_ref()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;

    #[test]
    fn content_lies_in_files_without_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let room = Room::new(4096).unwrap();
        for mut file in [room.file().unwrap(), File::from(unnamed(File::open(dir.path()).unwrap()).unwrap())] {
            file.write_all(b"content").unwrap();
            file.rewind().unwrap();
            let mut read = String::new();
            file.read_to_string(&mut read).unwrap();
            assert_eq!(read, "content");
            let mut reader = read_only(&file).unwrap();
            assert!(reader.write_all(b"other").is_err() && reader.read(&mut [0]).unwrap() == 1);
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn memory_that_is_set_aside_is_nobody_elses_until_it_is_used_or_given_back() {
        // The host's free memory changes meanwhile, so what is set aside is most of it.
        let Err(NoRoom::TooLittle { free }) = Room::new(u64::MAX) else { panic!("there is no end of memory") };
        let most = free / 8 * 5;
        let room = Room::new(most).unwrap();
        assert!(matches!(Room::new(most), Err(NoRoom::TooLittle { free }) if free < most));
        let mut file = room.file().unwrap();
        file.write_all(&[1; 8 << 20]).unwrap();
        let missing = lock(&ROOMS).rooms[&room.0].missing();
        assert!(missing <= most - (8 << 20), "{missing} of {most}");
        drop(room);
        drop(Room::new(most).unwrap());
    }
}

//! Where the content of suspended clients' memory goes: files without a name, in host memory or in a directory.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use super::super::host_memory::{self, NoRoom};
use super::error::SuspendError;

/// The place for content.
pub(super) enum Space {
    Memory,
    Directory(OwnedFd),
}

/// Room for files there.
pub(super) enum Room<'space> {
    Memory(host_memory::Room),
    Directory(&'space OwnedFd),
}

impl Space {
    /// Host memory, or the directory that came with the request.
    pub(super) fn new(directory: Option<OwnedFd>) -> Self {
        directory.map_or(Self::Memory, Self::Directory)
    }

    /// Room for so many bytes. Memory that is all zero takes none, so this may refuse content that would have fitted. Host memory is set
    /// aside until the result is dropped; a directory is only looked at.
    pub(super) fn room(&self, needed: u64) -> Result<Room<'_>, SuspendError> {
        match self {
            Self::Memory => match host_memory::Room::new(needed) {
                Ok(room) => Ok(Room::Memory(room)),
                Err(NoRoom::TooLittle { free }) => Err(SuspendError::Space { what: "host memory", needed, free }),
                Err(NoRoom::Unknown(error)) => Err(SuspendError::File(error)),
            },
            Self::Directory(directory) => {
                let found = rustix::fs::fstatvfs(directory).map_err(|error| SuspendError::File(error.into()))?;
                let free = found.f_bavail.saturating_mul(found.f_frsize);
                match needed <= free {
                    true => Ok(Room::Directory(directory)),
                    false => Err(SuspendError::Space { what: "the directory", needed, free }),
                }
            }
        }
    }
}

impl Room<'_> {
    /// A new file, open for reading and writing.
    pub(super) fn file(&self) -> io::Result<File> {
        match self {
            Self::Memory(room) => room.file(),
            Self::Directory(directory) => Ok(host_memory::unnamed(directory)?.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_that_does_not_fit_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        for space in [Space::Memory, Space::new(Some(File::open(dir.path()).unwrap().into()))] {
            assert!(space.room(4096).is_ok_and(|room| room.file().is_ok()));
            assert!(matches!(space.room(u64::MAX), Err(SuspendError::Space { needed: u64::MAX, .. })));
        }
    }
}

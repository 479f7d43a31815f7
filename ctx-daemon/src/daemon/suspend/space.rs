//! Where the content of suspended clients' memory goes: files without a name, in host memory or in a directory.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use super::super::host_memory;
use super::error::SuspendError;

/// The place for content.
pub(super) enum Space {
    Memory,
    Directory(OwnedFd),
}

impl Space {
    /// Host memory, or the directory that came with the request.
    pub(super) fn new(directory: Option<OwnedFd>) -> Self {
        directory.map_or(Self::Memory, Self::Directory)
    }

    /// A new file, open for reading and writing.
    pub(super) fn file(&self) -> io::Result<File> {
        match self {
            Self::Memory => host_memory::file(),
            Self::Directory(directory) => Ok(host_memory::unnamed(directory)?.into()),
        }
    }

    /// Checks that there is room for so many bytes. Memory that is all zero takes none, so this may refuse content that would
    /// have fitted.
    pub(super) fn check(&self, needed: u64) -> Result<(), SuspendError> {
        let (what, free) = match self {
            Self::Memory => ("host memory", host_memory::free().map_err(SuspendError::File)?),
            Self::Directory(directory) => {
                let found = rustix::fs::fstatvfs(directory).map_err(|error| SuspendError::File(error.into()))?;
                ("the directory", found.f_bavail.saturating_mul(found.f_frsize))
            }
        };
        if needed > free { Err(SuspendError::Space { what, needed, free }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_that_does_not_fit_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        for space in [Space::Memory, Space::new(Some(File::open(dir.path()).unwrap().into()))] {
            assert!(space.check(4096).is_ok());
            assert!(matches!(space.check(u64::MAX), Err(SuspendError::Space { needed: u64::MAX, .. })));
        }
    }
}

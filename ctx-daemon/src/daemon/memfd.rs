//! Shared memory that came from a client: checked before a worker maps it.
//!
//! A file that could shrink would end the worker by SIGBUS. A file that is not a memfd could be any file that its sender, or
//! the daemon, may open. Our seals can only be on a memfd, and cannot be removed.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use rekindle_wire::control::{Failing, FailureKind};
use rekindle_wire::layout::{SEALS, SHARED_SIZE, STAGING_SIZE};
use rustix::fs::SealFlags;
use thiserror::Error;

use super::sys;

/// Why a file cannot be shared with a worker.
#[derive(Debug, Error)]
pub(crate) enum MemfdError {
    #[error("{0} is not a sealed memfd")]
    NotSealed(&'static str),
    #[error("{what} has {found} bytes instead of {expected}")]
    Size { what: &'static str, found: u64, expected: u64 },
    #[error("{0} cannot be read and written")]
    Access(&'static str),
    #[error("cannot examine {what}: {source}")]
    Examine { what: &'static str, source: std::io::Error },
    #[error("{0} descriptors came instead of the ring's and the bounce buffer's")]
    Count(usize),
}

impl Failing for MemfdError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Examine { .. } => FailureKind::Internal,
            Self::NotSealed(_) | Self::Size { .. } | Self::Access(_) | Self::Count(_) => FailureKind::Refused,
        }
    }
}

/// Checks the ring and the staging file that come with an attach.
pub(crate) fn check_pair(fds: Vec<OwnedFd>) -> Result<[OwnedFd; 2], MemfdError> {
    let count = fds.len();
    let pair: [OwnedFd; 2] = fds.try_into().map_err(|_| MemfdError::Count(count))?;
    let pair = pair.map(File::from);
    check_ring(&pair[0])?;
    check_staging(&pair[1])?;
    Ok(pair.map(OwnedFd::from))
}

/// Checks a ring.
pub(crate) fn check_ring(file: &File) -> Result<(), MemfdError> {
    check(file, "the ring", SHARED_SIZE as u64)
}

/// Checks a staging file.
pub(crate) fn check_staging(file: &File) -> Result<(), MemfdError> {
    check(file, "the staging", STAGING_SIZE as u64)
}

/// Checks a file that must have exactly this size.
pub(crate) fn check(file: &File, what: &'static str, size: u64) -> Result<(), MemfdError> {
    let seals = sys::seals(file.as_fd()).map_err(|_| MemfdError::NotSealed(what))?;
    if !seals.contains(SealFlags::from_bits_retain(SEALS.cast_unsigned())) {
        return Err(MemfdError::NotSealed(what));
    }
    let examine = |source| MemfdError::Examine { what, source };
    // A memfd that is sealed against writing cannot serve as a ring.
    let writable = !seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE);
    if !writable || !sys::is_read_write(file.as_fd()).map_err(examine)? {
        return Err(MemfdError::Access(what));
    }
    let found = file.metadata().map_err(examine)?.len();
    if found != size {
        return Err(MemfdError::Size { what, found, expected: size });
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, fcntl_add_seals, memfd_create};

    /// Makes a memfd as the interposer does.
    pub(crate) fn memfd(name: &std::ffi::CStr, size: u64, seals: i32) -> File {
        let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap());
        file.set_len(size).unwrap();
        fcntl_add_seals(&file, SealFlags::from_bits_retain(seals.cast_unsigned())).unwrap();
        file
    }

    #[test]
    fn only_sealed_memfds_of_the_right_size_are_taken() {
        check(&memfd(c"good", 4096, SEALS), "it", 4096).unwrap();
        let message = |file: File| check(&file, "it", 4096).unwrap_err().to_string();
        let may_shrink = memfd(c"bad", 4096, libc::F_SEAL_GROW | libc::F_SEAL_SEAL);
        assert_eq!(message(may_shrink), "it is not a sealed memfd");
        let small = memfd(c"bad", 100, SEALS);
        assert_eq!(message(small), "it has 100 bytes instead of 4096");
        let read_only = memfd(c"bad", 4096, SEALS | libc::F_SEAL_WRITE);
        assert_eq!(message(read_only), "it cannot be read and written");
        let ordinary = tempfile::tempfile().unwrap();
        ordinary.set_len(4096).unwrap();
        assert_eq!(message(ordinary), "it is not a sealed memfd");
        let null = File::open("/dev/null").unwrap();
        assert_eq!(message(null), "it is not a sealed memfd");
    }

    #[test]
    fn an_attach_brings_exactly_two() {
        let ring = || memfd(c"ring", SHARED_SIZE as u64, SEALS).into();
        let staging = || memfd(c"staging", STAGING_SIZE as u64, SEALS).into();
        check_pair(vec![ring(), staging()]).unwrap();
        assert!(check_pair(vec![staging(), ring()]).is_err());
        assert!(check_pair(vec![ring()]).is_err());
        assert!(check_pair(vec![ring(), staging(), ring()]).is_err());
    }
}

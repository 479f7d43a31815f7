//! Processes with managed memory that moves. Each has a userfaultfd, of which CRIU knows nothing. At the moment of a dump it has no
//! effect, since the process has all of the memory; so a new one in its place is as good, and the process's worker gets that.

use std::fs;
use std::io;
use std::os::fd::RawFd;

use rekindle_wire::layout::MANAGED_NAME;
use rekindle_wire::userfault::LINK;
use thiserror::Error;

/// Why a userfaultfd is not dumped.
#[derive(Debug, Error)]
pub enum UserfaultError {
    /// It belongs to the program itself.
    #[error(
        "a process of this tree has a userfaultfd of its own, with which memory is filled from outside: CRIU cannot dump it"
    )]
    Foreign,
    /// A process's mappings cannot be read.
    #[error("the mappings of process {pid} cannot be read: {source}")]
    Maps {
        /// The process.
        pid: i32,
        /// The cause.
        source: io::Error,
    },
    /// No new one can be made.
    #[error("the process needs a userfaultfd for its managed memory, and the kernel refuses it: {0}")]
    Refused(io::Error),
}

/// Whether a descriptor of this process is a userfaultfd.
pub fn is_userfault(fd: RawFd) -> bool {
    fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|link| link.as_os_str() == LINK)
}

/// How many of these processes have managed memory that moves: each has one userfaultfd for that.
pub fn count(pids: &[i32]) -> Result<usize, UserfaultError> {
    let name = format!("/memfd:{MANAGED_NAME}");
    let has = |pid: i32| {
        let maps = fs::read(format!("/proc/{pid}/maps")).map_err(|source| UserfaultError::Maps { pid, source })?;
        Ok(String::from_utf8_lossy(&maps).lines().any(|line| line.contains(&name)))
    };
    pids.iter().try_fold(0, |count, pid| Ok(count + usize::from(has(*pid)?)))
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

    use rekindle_wire::userfault::Userfault;

    use super::*;

    #[test]
    fn only_a_userfaultfd_is_one() {
        let file = fs::File::open("/dev/null").unwrap();
        assert!(!is_userfault(file.as_raw_fd()) && !is_userfault(-1));
        if let Ok(made) = Userfault::new() {
            assert!(is_userfault(made.as_fd().as_raw_fd()));
        }
    }

    #[test]
    fn a_process_counts_when_it_has_pages_of_managed_memory() {
        let own = [std::process::id() as i32];
        let before = count(&own).unwrap();
        // SAFETY: makes a file and maps it at an address of the kernel's choice.
        let (_file, at) = unsafe {
            let file = OwnedFd::from_raw_fd(libc::memfd_create(c"rekindle-managed-7".as_ptr(), libc::MFD_CLOEXEC));
            assert_eq!(libc::ftruncate(file.as_raw_fd(), 4096), 0);
            let at = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
            assert_ne!(at, libc::MAP_FAILED);
            (file, at)
        };
        assert_eq!((before, count(&own).unwrap()), (0, 1));
        // SAFETY: mapped above, and not used.
        assert_eq!(unsafe { libc::munmap(at, 4096) }, 0);
        assert!(count(&[i32::MAX]).is_err());
    }
}

//! Processes with managed memory that moves. Each has a userfaultfd, of which CRIU knows nothing. At the moment of a dump it has no
//! effect, since the process has all of the memory; so a new one in its place is as good, and the process's worker gets that.

use std::fs;
use std::io;

use rekindle_wire::layout::USERFAULT_NAME;
use rekindle_wire::userfault;
use thiserror::Error;

/// Why a userfaultfd is not dumped.
#[derive(Debug, Error)]
pub enum UserfaultError {
    /// It belongs to the program itself.
    #[error(
        "a process of this tree has a userfaultfd of its own, with which memory is filled from outside: CRIU cannot dump it"
    )]
    Foreign,
    /// The program has closed it.
    #[error(
        "process {pid} has closed the userfaultfd of its managed memory, as programs do that close all descriptors: run it \
        with REKINDLE_MANAGED=host"
    )]
    Closed {
        /// The process.
        pid: i32,
    },
    /// A process's mappings or descriptors cannot be read.
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

/// How many of these processes have a userfaultfd for managed memory, by the mapping that says so. Each must have it still, and no
/// other: nobody could tell them apart in the restored process.
pub fn count(pids: &[i32]) -> Result<usize, UserfaultError> {
    let name = format!("/memfd:{} ", USERFAULT_NAME.to_string_lossy());
    let mut count = 0;
    for &pid in pids {
        let unreadable = |source| UserfaultError::Maps { pid, source };
        let maps = fs::read(format!("/proc/{pid}/maps")).map_err(unreadable)?;
        if !String::from_utf8_lossy(&maps).lines().any(|line| line.contains(&name)) {
            continue;
        }
        count += 1;
        match userfault::open_in(pid).map_err(unreadable)?.len() {
            0 => return Err(UserfaultError::Closed { pid }),
            1 => {}
            _ => return Err(UserfaultError::Foreign),
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    use rekindle_wire::userfault::Userfault;

    use super::*;

    #[test]
    fn a_process_counts_when_a_mapping_says_so_and_must_have_one_userfaultfd() {
        let own = [std::process::id() as i32];
        assert_eq!(count(&own).unwrap(), 0);
        // SAFETY: makes a file and maps it at an address of the kernel's choice.
        let (_file, at) = unsafe {
            let file = OwnedFd::from_raw_fd(libc::memfd_create(USERFAULT_NAME.as_ptr(), libc::MFD_CLOEXEC));
            assert_eq!(libc::ftruncate(file.as_raw_fd(), 4096), 0);
            let at = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
            assert_ne!(at, libc::MAP_FAILED);
            (file, at)
        };
        assert!(matches!(count(&own), Err(UserfaultError::Closed { .. })));
        if let Ok(_first) = Userfault::new() {
            assert_eq!(count(&own).unwrap(), 1);
            let _second = Userfault::new().unwrap();
            assert!(matches!(count(&own), Err(UserfaultError::Foreign)));
        }
        // SAFETY: mapped above, and not used.
        assert_eq!(unsafe { libc::munmap(at, 4096) }, 0);
        assert!(matches!(count(&[i32::MAX]), Err(UserfaultError::Maps { .. })));
    }
}

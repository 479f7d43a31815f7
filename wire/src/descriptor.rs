//! Descriptors of a library in somebody else's process.
//!
//! A program may have closed its stdin, stdout or stderr, and print all the same. The kernel gives their numbers to whoever
//! opens something next. What the program prints must not get into our connections, nor into memory that we share.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Moves a descriptor to a number that is none of stdin, stdout and stderr. The new descriptor is closed on exec.
///
/// # Errors
/// The errors of `fcntl`: the process has as many descriptors as it may have. The descriptor is closed.
pub fn above_standard(descriptor: OwnedFd) -> io::Result<OwnedFd> {
    if descriptor.as_raw_fd() > libc::STDERR_FILENO {
        return Ok(descriptor);
    }
    // SAFETY: duplicates a descriptor; the new one is nobody else's.
    unsafe {
        match libc::fcntl(descriptor.as_raw_fd(), libc::F_DUPFD_CLOEXEC, libc::STDERR_FILENO + 1) {
            -1 => Err(io::Error::last_os_error()),
            moved => Ok(OwnedFd::from_raw_fd(moved)),
        }
    }
}

/// Connects to a Unix socket by a descriptor that is none of stdin, stdout and stderr.
///
/// # Errors
/// The errors of `connect` and of [`above_standard`].
pub fn connect(path: impl AsRef<Path>) -> io::Result<UnixStream> {
    above_standard(UnixStream::connect(path)?.into()).map(UnixStream::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_opened_in_place_of_a_closed_stderr_is_moved_away_from_it() {
        // SAFETY: the child makes system calls only, and ends; it is reaped here.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::close(libc::STDERR_FILENO);
                let opened = libc::memfd_create(c"test".as_ptr(), 0);
                let moved = above_standard(OwnedFd::from_raw_fd(opened)).map_or(-1, |moved| moved.as_raw_fd());
                let closed = libc::fcntl(libc::STDERR_FILENO, libc::F_GETFD) == -1;
                libc::_exit(i32::from(opened != libc::STDERR_FILENO || moved <= libc::STDERR_FILENO || !closed));
            }
            let mut status = -1;
            libc::waitpid(child, &raw mut status, 0);
            status
        };
        assert_eq!(status, 0);
    }
}

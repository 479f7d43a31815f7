//! Sockets of the application, as the kernel describes them.

use std::io;
use std::os::fd::RawFd;

use thiserror::Error;

/// The kernel does not tell a property of a socket.
#[derive(Debug, Error)]
pub enum SocketError {
    /// The socket has no cookie.
    #[error("a socket has no cookie: {0}")]
    Cookie(io::Error),
    /// The length of the socket's queue is unknown.
    #[error("cannot look at a socket's queue: {0}")]
    Queue(io::Error),
}

/// The kernel's number of a socket, the same for all processes that have it open.
pub fn cookie(fd: RawFd) -> Result<u64, SocketError> {
    let mut cookie = 0_u64;
    let mut size = size_of::<u64>() as libc::socklen_t;
    // SAFETY: `cookie` has the size that SO_COOKIE asks for.
    let result =
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_COOKIE, (&raw mut cookie).cast(), &raw mut size) };
    match result {
        0 => Ok(cookie),
        _ => Err(SocketError::Cookie(io::Error::last_os_error())),
    }
}

/// Whether a socket has data that its process has not read.
pub fn has_unread(fd: RawFd) -> Result<bool, SocketError> {
    let mut bytes = 0;
    // SAFETY: SIOCINQ (FIONREAD) writes an int.
    match unsafe { libc::ioctl(fd, libc::FIONREAD, &raw mut bytes) } {
        0 => Ok(bytes > 0),
        _ => Err(SocketError::Queue(io::Error::last_os_error())),
    }
}

//! Finds out whether a socket that CRIU found in a process leads to this daemon.
//!
//! In most cases the cookie decides: every client names it when it attaches. The cookie is unknown for a process that was
//! frozen before it said anything, and for one that was restored under a former daemon; in these cases the process's
//! descriptors are searched. After a wrong answer, a restore would put a connection to us in the place of a foreign one.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use super::super::sys;

/// Whether a process has a socket with this cookie that is connected to `path`, as the daemon has bound it.
pub(super) fn leads_to(pid: i32, cookie: u64, path: &Path) -> io::Result<bool> {
    let process = sys::pidfd_open(pid)?;
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        let number = entry.file_name().to_str().and_then(|it| it.parse().ok());
        let Some(number) = number.filter(|_| target.as_os_str().as_encoded_bytes().starts_with(b"socket:")) else {
            continue;
        };
        let socket = match sys::pidfd_getfd(process.as_fd(), number) {
            // Another thread of the process has closed the descriptor since.
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => continue,
            socket => socket?,
        };
        if sys::cookie(socket.as_fd()).is_ok_and(|it| it == cookie) {
            return Ok(is_connected_to(socket, path));
        }
    }
    Ok(false)
}

fn is_connected_to(socket: OwnedFd, path: &Path) -> bool {
    // This fails where the descriptor is no Unix socket, or not connected.
    let peer = UnixStream::from(socket).peer_addr();
    peer.is_ok_and(|it| it.as_pathname() == Some(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn only_a_connection_to_the_path_counts() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, other) = (dir.path().join("ours"), dir.path().join("other"));
        let _listeners = [&ours, &other].map(|path| UnixListener::bind(path).unwrap());
        let [a, b] = [&ours, &other].map(|path| UnixStream::connect(path).unwrap());
        let own = std::process::id() as i32;
        let cookie = |socket: &UnixStream| sys::cookie(socket.as_fd()).unwrap();
        assert!(leads_to(own, cookie(&a), &ours).unwrap());
        assert!(!leads_to(own, cookie(&a), &other).unwrap());
        assert!(!leads_to(own, cookie(&b), &ours).unwrap());
        assert!(!leads_to(own, u64::MAX, &ours).unwrap());
    }
}

//! A Unix socket that a dead daemon left.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Why there cannot be a socket at a path.
#[derive(Debug)]
pub(super) enum Stale {
    /// Somebody serves it.
    Taken,
    Io {
        action: &'static str,
        source: io::Error,
    },
}

/// Removes the socket at a path that nobody serves, if there is one.
pub(super) fn remove(path: &Path) -> Result<(), Stale> {
    let failed = |action| move |source| Stale::Io { action, source };
    match UnixStream::connect(path) {
        Ok(_) => Err(Stale::Taken),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // The error is the same for a file that is no socket; that file is not ours to remove.
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            let status = std::fs::symlink_metadata(path).map_err(failed("examine"))?;
            if !status.file_type().is_socket() {
                return Err(failed("listen on")(io::Error::other("there is a file that is no socket")));
            }
            std::fs::remove_file(path).map_err(failed("remove the stale"))
        }
        Err(error) => Err(failed("try")(error)),
    }
}

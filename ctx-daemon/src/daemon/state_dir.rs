//! The daemon's state directory: data for the next daemon, which may trust it.
//!
//! Only the daemon's user has access to the directory. No container sees it, and workers have users of their own and no
//! access by landlock.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use tracing::warn;

use super::sys;

/// Makes the directory, and all above it.
pub(crate) fn make(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Whether the content of a directory can be trusted: only this user can write there. A missing directory has no content.
pub(crate) fn is_ours(dir: &Path) -> bool {
    match fs::metadata(dir) {
        Ok(about) if about.uid() == sys::own_uid() && about.mode() & 0o022 == 0 => true,
        Ok(_) => {
            warn!("{} belongs to another user, or others may write to it: ignoring its contents", dir.display());
            false
        }
        Err(_) => false,
    }
}

/// Writes a file completely or not at all.
pub(crate) fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, content)?;
    fs::rename(new, path)
}

/// Identifies the machine's start: numbers of processes, namespaces and sockets mean nothing after the next start.
pub(crate) fn boot() -> io::Result<String> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|it| it.trim_end().to_owned())
}

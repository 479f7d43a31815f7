//! Telling a person what went wrong. podman shows that the hook failed, but gives it /dev/null as its stderr (5.4, 5.8);
//! so the line goes where podman writes its own.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::parent_id;

const STDERR: RawFd = 2;

/// Writes one line to stderr or, where nobody would read that, to the stderr of the process that has started this one.
pub(crate) fn error(line: &str) {
    if stderr_is_null() && parents_stderr().is_some_and(|mut file| writeln!(file, "{line}").is_ok()) {
        return;
    }
    eprintln!("{line}");
}

fn stderr_is_null() -> bool {
    let null = fs::metadata("/dev/null").map(|null| null.rdev());
    let stderr = fs::metadata(format!("/proc/self/fd/{STDERR}")).map(|stderr| stderr.rdev());
    matches!((null, stderr), (Ok(null), Ok(stderr)) if null == stderr)
}

/// The open file itself, position and all, so that what podman writes next does not overwrite the line.
fn parents_stderr() -> Option<File> {
    let own = |fd: i64| {
        // SAFETY: the kernel has just made the descriptor for us, where it is one.
        RawFd::try_from(fd).ok().filter(|&fd| fd >= 0).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
    };
    let no_flags = 0;
    // SAFETY: a pid and flags.
    let parent = own(unsafe { libc::syscall(libc::SYS_pidfd_open, parent_id(), no_flags) })?;
    // SAFETY: descriptors and flags.
    let file = own(unsafe { libc::syscall(libc::SYS_pidfd_getfd, parent.as_raw_fd(), STDERR, no_flags) })?;
    Some(file.into())
}

//! How many files this process may have open.

/// As many as may be had: an image and those that it builds on have up to 16 data files each of a process, and the default
/// is 1024. Not for what becomes another program, which may rely on that. Where it cannot be had, opening a file says so.
pub(crate) fn raise_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes the local, and reads it afterwards.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

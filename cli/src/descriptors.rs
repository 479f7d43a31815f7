//! How many files this process may have open.

/// Works with as many as may be had: an image and those that it builds on have up to 16 data files each of a process, and
/// the default is 1024. Afterwards the limit is as before: programs that are started may rely on it. Where no more can be
/// had, opening a file says so.
pub(crate) fn with_most<T>(work: impl FnOnce() -> T) -> T {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes the local.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return work();
    }
    let most = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
    // SAFETY: the kernel reads the local.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const most) };
    let done = work();
    // SAFETY: as above.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    done
}

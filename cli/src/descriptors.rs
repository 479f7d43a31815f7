//! The limit of open files of this process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit as far as allowed: an image and those that it builds on have up to 16 data files for each process, and
/// the default is 1024. Afterwards the limit is as before, since programs that are started may rely on it. If the limit cannot
/// be raised far enough, opening a file fails.
pub(crate) fn with_most<T>(work: impl FnOnce() -> T) -> T {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    let done = work();
    let _ = setrlimit(Resource::Nofile, limit);
    done
}

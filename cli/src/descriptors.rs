//! How many files this process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Works with as many as may be had: an image and those that it builds on have up to 16 data files each of a process, and
/// the default is 1024. Afterwards the limit is as before: programs that are started may rely on it. Where no more can be
/// had, opening a file says so.
pub(crate) fn with_most<T>(work: impl FnOnce() -> T) -> T {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    let done = work();
    let _ = setrlimit(Resource::Nofile, limit);
    done
}

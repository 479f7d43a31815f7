//! Threads that this library creates in the application's process.
//!
//! The application does not know about them, so its signals must not go to them. From its first instruction on, such a
//! thread blocks all signals except those for its own faults: a fault whose signal is blocked would end the process, although
//! the application may have a handler that repairs it (memory that it protects itself).
//!
//! The number of threads can be limited (`pids.max`, `RLIMIT_NPROC`). So each caller handles the case that no thread can be
//! created.

use std::io;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// The signals for a thread's own faults.
const FAULTS: [i32; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// The stack size of the driver's threads: functions of the application run on them.
const STACK: usize = 8 << 20;
/// The stack size for a copy, and a handler of the application for faults.
const HELPER_STACK: usize = 1 << 20;

/// Starts a thread that runs until the process ends.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    without_signals(|| Builder::new().name(name.into()).stack_size(STACK).spawn(body))
}

/// Starts a thread that does part of its caller's work.
pub(crate) fn spawn_helper<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    body: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    #[cfg(test)]
    if tests::REFUSED.get() {
        return Err(io::Error::from_raw_os_error(libc::EAGAIN));
    }
    without_signals(|| Builder::new().name(name.into()).stack_size(HELPER_STACK).spawn_scoped(scope, body))
}

/// Runs `work` while this thread blocks signals. A thread that `work` creates inherits that.
fn without_signals<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: the sets are locals, written before they are read; the mask is this thread's own.
    let before = unsafe {
        let [mut blocked, mut before] = [std::mem::zeroed::<libc::sigset_t>(); 2];
        libc::sigfillset(&raw mut blocked);
        for signal in FAULTS {
            libc::sigdelset(&raw mut blocked, signal);
        }
        (libc::pthread_sigmask(libc::SIG_BLOCK, &raw const blocked, &raw mut before) == 0).then_some(before)
    };
    let result = work();
    if let Some(before) = before {
        // SAFETY: sets this thread's mask to what it was.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    }
    result
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::cell::Cell;

    thread_local! {
        /// Whether this thread can make no helpers, as where the process may have no more threads.
        pub(crate) static REFUSED: Cell<bool> = const { Cell::new(false) };
    }

    /// The signals that the calling thread blocks.
    fn blocked() -> Vec<i32> {
        // SAFETY: the set is a local that the call writes.
        let set = unsafe {
            let mut set = std::mem::zeroed::<libc::sigset_t>();
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut set);
            set
        };
        // 32 and 33 are the C library's.
        let signals = (1..=64).filter(|signal| ![32, 33, libc::SIGKILL, libc::SIGSTOP].contains(signal));
        // SAFETY: reads the local.
        signals.filter(|signal| unsafe { libc::sigismember(&raw const set, *signal) } == 1).collect()
    }

    #[test]
    fn a_helper_thread_blocks_all_signals_except_its_own_faults() {
        let before = blocked();
        let (done, seen) = std::sync::mpsc::channel();
        spawn("test", move || drop(done.send(blocked()))).unwrap().join().unwrap();
        let helper = std::thread::scope(|scope| spawn_helper(scope, "test", blocked).unwrap().join().unwrap());
        for blocked in [seen.recv().unwrap(), helper] {
            assert_eq!(blocked.len(), 64 - 4 - FAULTS.len(), "{blocked:?}");
            assert!(!blocked.iter().any(|signal| FAULTS.contains(signal)), "{blocked:?}");
        }
        assert_eq!(blocked(), before);
    }
}

//! Sleeping on a word of shared memory.

#[cfg(feature = "model")]
pub use crate::model::{wait, wake};
#[cfg(not(feature = "model"))]
use {crate::sync::AtomicU32, std::time::Duration};

/// Sleeps while `word` holds `expected`, at most for `timeout`. May wake early: callers look again. After a restore
/// the kernel ends the wait with `EINTR`, which is an early wake like any other.
#[cfg(not(feature = "model"))]
pub fn wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let timeout = libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
    };
    // SAFETY: the word is a live, aligned u32, and the timeout outlives the call. Not FUTEX_PRIVATE: two processes
    // share the page.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, &raw const timeout, 0, 0);
    }
}

/// Wakes up to `count` sleepers of `word`.
#[cfg(not(feature = "model"))]
pub fn wake(word: &AtomicU32, count: i32) {
    // SAFETY: the word is a live, aligned u32; waking has no other effect on memory.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, count, 0, 0, 0);
    }
}

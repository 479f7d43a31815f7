//! The page that a process shares with whoever checkpoints it.
//!
//! It lies in a memfd, which CRIU restores with its content. A request is a number higher than that of the last answer; whoever
//! makes one waits first until the one before is answered, which may be that of a process that was killed meanwhile.

use std::ffi::CStr;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::Duration;

use crate::memory::pages;

/// The memfd's name.
pub(super) const NAME: &CStr = c"simgpu-checkpoint";
/// The size of its mapping.
pub(super) const BYTES: usize = 4096;

/// What both sides see.
#[repr(C)]
pub(super) struct Page {
    /// The worker, as the process itself numbers it.
    pub(super) thread: AtomicI32,
    /// A `CUprocessState`.
    pub(super) state: AtomicU32,
    /// The number of the last request, and of the last answer.
    pub(super) asked: AtomicU32,
    pub(super) answered: AtomicU32,
    /// What is asked for: one of [`Request`].
    pub(super) request: AtomicU32,
    pub(super) timeout_ms: AtomicU32,
    /// The last answer: a `CUresult`.
    pub(super) result: AtomicI32,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Lock = 1,
    Checkpoint = 2,
    Restore = 3,
    Unlock = 4,
}

impl Request {
    pub(super) fn of(number: u32) -> Option<Self> {
        [Self::Lock, Self::Checkpoint, Self::Restore, Self::Unlock].into_iter().find(|it| *it as u32 == number)
    }
}

/// Makes the page of this process. Its children do not have it: they are processes of their own.
pub(super) fn make() -> Option<&'static Page> {
    let file = pages::memfd(NAME, BYTES as u64).ok()?;
    let at = map(&file)?;
    // SAFETY: the page just mapped.
    unsafe { libc::madvise(at.cast(), BYTES, libc::MADV_DONTFORK) };
    // SAFETY: zeros are a page, and it stays.
    Some(unsafe { &*at })
}

/// Maps such a page.
pub(super) fn map(file: &impl std::os::fd::AsRawFd) -> Option<*mut Page> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), BYTES, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    (at != libc::MAP_FAILED).then_some(at.cast())
}

/// Waits until a word is another than this, or a while.
pub(super) fn wait(word: &AtomicU32, is: u32, time: Duration) {
    let limit = libc::timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
    // SAFETY: a word that stays mapped for the time of the call, and a live local. It may return for no reason.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, is, &raw const limit, 0, 0) };
}

/// Changes a word, and wakes whoever waits for that.
pub(super) fn set(word: &AtomicU32, value: u32) {
    word.store(value, Ordering::SeqCst);
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX, 0, 0, 0) };
}

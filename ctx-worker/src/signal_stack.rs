//! Stacks on which a worker's threads handle signals.
//!
//! The kernel saves all registers of the processor in a signal frame: 3.4 KB with AVX-512, 11 KB with AMX. The standard
//! library's alternate stack has 8 KB, and the rest that the frame leaves is too small for the handler of
//! [`crate::serve::crash`]. So each thread of a worker has an alternate stack of its own, large enough for the largest
//! frame and the handlers.
//!
//! The memory comes from the heap. A mapping would move what the driver maps later, see [`crate::serve::start`].

use std::io;
use std::mem::MaybeUninit;
use std::thread::{JoinHandle, Scope, ScopedJoinHandle};

/// The stack that handlers need beside the frame: ours, the standard library's that runs after it, and the functions that
/// both call, unoptimised.
const HANDLERS: usize = 64 << 10;

/// The alternate stack of the thread that made it. Dropping it brings the earlier stack back.
pub(crate) struct SignalStack {
    before: libc::stack_t,
    /// The memory of the stack. Handlers run on it, and nothing else uses it.
    _memory: Box<[MaybeUninit<u8>]>,
}

impl SignalStack {
    /// Gives this thread a stack for its signal handlers.
    ///
    /// # Errors
    ///
    /// The kernel refuses the stack, for example because the thread is in a handler already.
    pub(crate) fn install() -> io::Result<Self> {
        let mut memory = Box::new_uninit_slice(size(minimum()));
        let new = libc::stack_t { ss_sp: memory.as_mut_ptr().cast(), ss_flags: 0, ss_size: memory.len() };
        let mut before = libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
        // SAFETY: the memory stays until `drop` has taken it from the kernel again.
        match unsafe { libc::sigaltstack(&raw const new, &raw mut before) } {
            0 => Ok(Self { before, _memory: memory }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for SignalStack {
    fn drop(&mut self) {
        // SAFETY: the stack of before is the standard library's, which keeps it until the thread has ended, or none.
        unsafe { libc::sigaltstack(&raw const self.before, std::ptr::null_mut()) };
    }
}

/// Starts a thread of a worker, which has a [`SignalStack`] as long as it works. Where the kernel refuses the stack, a
/// crash of that thread may not be logged.
pub(crate) struct Thread(std::thread::Builder);

impl Thread {
    pub(crate) fn named(name: &str) -> Self {
        Self(std::thread::Builder::new().name(name.into()))
    }

    /// Sets the size of the thread's own stack, in bytes.
    pub(crate) fn stack_size(self, bytes: usize) -> Self {
        Self(self.0.stack_size(bytes))
    }

    pub(crate) fn spawn<T: Send + 'static>(
        self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        self.0.spawn(with_signal_stack(work))
    }

    pub(crate) fn spawn_scoped<'scope, 'env, T: Send + 'scope>(
        self,
        scope: &'scope Scope<'scope, 'env>,
        work: impl FnOnce() -> T + Send + 'scope,
    ) -> io::Result<ScopedJoinHandle<'scope, T>> {
        self.0.spawn_scoped(scope, with_signal_stack(work))
    }
}

fn with_signal_stack<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    move || {
        let _stack = SignalStack::install();
        work()
    }
}

/// The largest signal frame of this processor, in bytes (`AT_MINSIGSTKSZ`, getauxval(3)); 0 on kernels before 5.14, whose
/// frames are at most [`libc::MINSIGSTKSZ`] there.
fn minimum() -> usize {
    /// `<linux/auxvec.h>`
    const AT_MINSIGSTKSZ: libc::c_ulong = 51;
    // SAFETY: no pointers.
    unsafe { libc::getauxval(AT_MINSIGSTKSZ) as usize }
}

fn size(frame: usize) -> usize {
    frame.max(libc::MINSIGSTKSZ) + HANDLERS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_this_thread() -> libc::stack_t {
        let mut now = libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: 0, ss_size: 0 };
        // SAFETY: the kernel writes the description, and nothing changes.
        assert_eq!(unsafe { libc::sigaltstack(std::ptr::null(), &raw mut now) }, 0);
        now
    }

    #[test]
    fn threads_of_a_worker_have_room_for_a_signal_frame_and_the_handlers() {
        let started = Thread::named("test").spawn(|| of_this_thread().ss_size).unwrap().join().unwrap();
        let scoped = std::thread::scope(|scope| {
            Thread::named("test").spawn_scoped(scope, || of_this_thread().ss_size).unwrap().join().unwrap()
        });
        for size in [started, scoped] {
            assert!(size >= minimum() + HANDLERS, "{size} bytes beside a frame of {}", minimum());
        }
    }

    #[test]
    fn the_stack_of_before_comes_back_when_a_signal_stack_is_dropped() {
        let before = of_this_thread();
        let during = SignalStack::install().map(|_stack| of_this_thread()).unwrap();
        assert!(during.ss_size >= minimum() + HANDLERS);
        assert_eq!((of_this_thread().ss_sp, of_this_thread().ss_size), (before.ss_sp, before.ss_size));
    }

    #[test]
    fn a_frame_of_any_processor_leaves_the_handlers_their_room() {
        for frame in [0, 2048, 3376, 11 << 10, 1 << 20] {
            assert!(size(frame) - frame >= HANDLERS);
        }
    }
}

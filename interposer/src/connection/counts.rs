//! Counting calls, where the worker finds the counts (see [`rekindle_wire::calls`]). Nothing is counted before the
//! process is attached.

use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;

use rekindle_wire::calls;
use rekindle_wire::layout::Shared;

use crate::process::calling_thread;

/// The shared memory; null before it is there, and in a forked child, which does not have it.
static SHARED: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());

/// Begins to count calls in this memory, which stays mapped.
pub(crate) fn begin(shared: Shared) {
    SHARED.store(shared.base(), Relaxed);
}

/// Ends the counting. Only stores to an atomic, for a forked child.
pub(crate) fn end() {
    SHARED.store(std::ptr::null_mut(), Relaxed);
}

fn shared() -> Option<Shared> {
    let base = SHARED.load(Relaxed);
    // SAFETY: what `begin` was given: a mapping that stays for the life of the process.
    (!base.is_null()).then(|| unsafe { Shared::new(base) })
}

/// The application calls a function.
#[inline]
pub(crate) fn asked(function: u16) {
    if let Some(shared) = shared() {
        calls::asked(&shared, calling_thread::number(), function);
    }
}

/// The function is refused.
#[cold]
pub(crate) fn refused(function: u16) {
    if let Some(shared) = shared() {
        calls::refused(&shared, function);
    }
}

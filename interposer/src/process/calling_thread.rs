//! The calling thread: its number, whether it runs callbacks, which default stream the call under way means, and its end.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rekindle_cuda_abi::types::*;

thread_local! {
    static NUMBER: Cell<u32> = {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        Cell::new(NEXT.fetch_add(1, Relaxed))
    };
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
    /// Whether stream 0 is the calling thread's own default stream in the call under way.
    static OWN_DEFAULT_STREAM: Cell<bool> = const { Cell::new(false) };
    static END: End = const { End };
    /// Whether this thread does a part of another's work, whose streams it uses.
    static HELPS: Cell<bool> = const { Cell::new(false) };
}

/// The function that a thread calls at its end if it has used its own default stream.
static AT_END: OnceLock<fn()> = OnceLock::new();

/// Reports the thread's end when it is dropped.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        if let Some(report) = AT_END.get() {
            report();
        }
    }
}

/// From now on, the end of each thread that has used its own default stream calls `report`, in that thread.
pub(crate) fn at_end(report: fn()) {
    // The first one stays: there is only one.
    let _ = AT_END.set(report);
}

/// The calling thread's number, from 1.
pub(crate) fn number() -> u32 {
    NUMBER.get()
}

/// Whether the calling thread runs callbacks, which must not call the driver.
pub(crate) fn in_callback() -> bool {
    IN_CALLBACK.get()
}

/// From now on the calling thread runs callbacks.
pub(crate) fn run_callbacks() {
    IN_CALLBACK.set(true);
}

/// Runs a function's `_ptsz` or `_ptds` form.
pub(crate) fn with_thread_stream(body: impl FnOnce() -> CUresult) -> CUresult {
    let before = OWN_DEFAULT_STREAM.replace(true);
    let result = body();
    OWN_DEFAULT_STREAM.set(before);
    result
}

/// A stream parameter by its full name: 0 is the legacy or the thread's default stream, depending on the call's form.
pub(crate) fn named_stream(stream: CUstream) -> CUstream {
    let named = match stream {
        0 if OWN_DEFAULT_STREAM.get() => CU_STREAM_PER_THREAD,
        0 => CU_STREAM_LEGACY,
        other => other,
    };
    if named == CU_STREAM_PER_THREAD && !HELPS.get() {
        // A thread that is ending already has reported it.
        let _ = END.try_with(|_| ());
    }
    named
}

/// A thread's identity for its commands, which a helper thread takes over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    number: u32,
    own_default_stream: bool,
}

impl Identity {
    /// The identity of the calling thread in the call under way.
    pub(crate) fn of_caller() -> Self {
        Self { number: number(), own_default_stream: OWN_DEFAULT_STREAM.get() }
    }

    /// Makes the calling thread's commands that other thread's, for a helper that does a part of its work. The helper's own
    /// end is not reported.
    pub(crate) fn assume(self) {
        NUMBER.set(self.number);
        OWN_DEFAULT_STREAM.set(self.own_default_stream);
        HELPS.set(true);
    }
}

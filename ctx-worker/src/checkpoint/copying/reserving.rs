//! A thread that reserves memory for a copy.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;

use crate::signal_stack::Thread;

/// A thread that reserves memory.
pub(crate) struct Reserving {
    thread: JoinHandle<()>,
    /// Whether the executor waits for the thread.
    hurry: Arc<AtomicBool>,
}

impl Reserving {
    /// Starts the thread. `work` checks `hurry` where it waits.
    pub(crate) fn begin(hurry: Arc<AtomicBool>, work: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        Ok(Self { thread: Thread::named("reserve").spawn(work)?, hurry })
    }

    /// Waits until the memory has been reserved, as far as memory is free now.
    pub(crate) fn join(self) {
        self.hurry.store(true, Relaxed);
        drop(self.thread.join());
    }
}

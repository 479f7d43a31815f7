//! A thread that sets memory aside for a copy.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;

use crate::signal_stack::Thread;

/// A thread that sets memory aside.
pub(crate) struct Reserving {
    thread: JoinHandle<()>,
    /// Somebody waits for it.
    hurry: Arc<AtomicBool>,
}

impl Reserving {
    /// Begins. `work` looks at `hurry` where it waits.
    pub(crate) fn begin(hurry: Arc<AtomicBool>, work: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        Ok(Self { thread: Thread::named("reserve").spawn(work)?, hurry })
    }

    /// Waits until the memory has been set aside, as far as there is any now.
    pub(crate) fn join(self) {
        self.hurry.store(true, Relaxed);
        drop(self.thread.join());
    }
}

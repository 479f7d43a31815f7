//! Events: what the process must know to check a record at once, and a wait in a capture.

use std::collections::HashMap;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rekindle_cuda_abi::types::*;

/// An event that the application made.
struct Event {
    context: CUcontext,
    /// Whether it was recorded outside of captures.
    recorded: AtomicBool,
    /// Other processes may have it.
    shared: bool,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Events {
    by_handle: RwLock<HashMap<CUevent, Event>>,
}

impl Events {
    pub(crate) fn context(&self, event: CUevent) -> Option<CUcontext> {
        self.by_handle.read().ok()?.get(&event).map(|e| e.context)
    }

    /// The context of an event that is about to be recorded.
    pub(crate) fn record(&self, event: CUevent) -> Option<CUcontext> {
        let map = self.by_handle.read().ok()?;
        let event = map.get(&event)?;
        event.recorded.store(true, Relaxed);
        Some(event.context)
    }

    /// Whether it has been recorded.
    pub(crate) fn is_recorded(&self, event: CUevent) -> bool {
        self.by_handle.read().is_ok_and(|map| map.get(&event).is_some_and(|e| e.recorded.load(Relaxed)))
    }

    /// Whether other processes may have it.
    pub(crate) fn is_shared(&self, event: CUevent) -> bool {
        self.by_handle.read().is_ok_and(|map| map.get(&event).is_some_and(|e| e.shared))
    }

    pub(crate) fn insert(&self, event: CUevent, context: CUcontext, shared: bool) {
        if let Ok(mut map) = self.by_handle.write() {
            map.insert(event, Event { context, recorded: AtomicBool::new(false), shared });
        }
    }

    pub(crate) fn remove(&self, event: CUevent) {
        if let Ok(mut map) = self.by_handle.write() {
            map.remove(&event);
        }
    }

    /// Forgets the events of a context that is gone.
    pub(crate) fn forget_context(&self, context: CUcontext) {
        if let Ok(mut map) = self.by_handle.write() {
            map.retain(|_, e| e.context != context);
        }
    }
}

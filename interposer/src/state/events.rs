//! Events: what the driver says at once about one that is recorded.

use std::collections::HashMap;
use std::sync::RwLock;

use rekindle_cuda_abi::types::*;

/// The context of each event that the application made.
#[derive(Default)]
pub(crate) struct Events {
    contexts: RwLock<HashMap<CUevent, CUcontext>>,
}

impl Events {
    pub(crate) fn context(&self, event: CUevent) -> Option<CUcontext> {
        self.contexts.read().ok()?.get(&event).copied()
    }

    pub(crate) fn insert(&self, event: CUevent, context: CUcontext) {
        if let Ok(mut map) = self.contexts.write() {
            map.insert(event, context);
        }
    }

    pub(crate) fn remove(&self, event: CUevent) {
        if let Ok(mut map) = self.contexts.write() {
            map.remove(&event);
        }
    }

    /// Forgets the events of a context that is gone.
    pub(crate) fn forget_context(&self, context: CUcontext) {
        if let Ok(mut map) = self.contexts.write() {
            map.retain(|_, c| *c != context);
        }
    }
}

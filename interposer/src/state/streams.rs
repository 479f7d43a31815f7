//! Streams: what this process answers about them without the worker.

use std::collections::HashMap;
use std::sync::RwLock;

use rekindle_cuda_abi::types::*;

use super::stream_attributes::StreamAttributes;

/// A stream that the application created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    pub(crate) context: CUcontext,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    /// `cuStreamGetId`: unique, because cuBLAS keys its workspaces by it.
    pub(crate) id: u64,
}

/// All streams by handle.
#[derive(Default)]
pub(crate) struct Streams {
    by_handle: RwLock<HashMap<CUstream, Stream>>,
    pub(crate) attributes: StreamAttributes,
}

impl Streams {
    pub(crate) fn get(&self, stream: CUstream) -> Option<Stream> {
        self.by_handle.read().ok()?.get(&stream).copied()
    }

    pub(crate) fn insert(&self, handle: CUstream, stream: Stream) {
        if let Ok(mut map) = self.by_handle.write() {
            map.insert(handle, stream);
        }
    }

    pub(crate) fn remove(&self, handle: CUstream) -> bool {
        self.attributes.forget_stream(handle);
        self.by_handle.write().is_ok_and(|mut m| m.remove(&handle).is_some())
    }

    /// Forgets the streams of a context that is gone.
    pub(crate) fn forget_context(&self, context: CUcontext) {
        self.attributes.forget_context(context);
        if let Ok(mut map) = self.by_handle.write() {
            map.retain(|_, s| s.context != context);
        }
    }
}

//! Arrays as the process knows them: their shapes, so that what is wrong with a copy is said at once.

use std::collections::HashMap;
use std::sync::RwLock;

use rekindle_cuda_abi::types::*;

/// An array.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub(crate) desc: CudaArray3dDescriptor,
    pub(crate) context: CUcontext,
}

/// All arrays by their handles.
#[derive(Default)]
pub(crate) struct Arrays {
    arrays: RwLock<HashMap<CUarray, Array>>,
}

impl Arrays {
    /// The array of a handle.
    pub(crate) fn get(&self, array: CUarray) -> Result<Array, CUresult> {
        let arrays = self.arrays.read().map_err(|_| CUDA_ERROR_UNKNOWN)?;
        arrays.get(&array).cloned().ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    pub(crate) fn insert(&self, handle: CUarray, array: Array) {
        if let Ok(mut arrays) = self.arrays.write() {
            arrays.insert(handle, array);
        }
    }

    pub(crate) fn remove(&self, handle: CUarray) -> Option<Array> {
        self.arrays.write().ok()?.remove(&handle)
    }

    /// Forgets what a context held.
    pub(crate) fn forget_context(&self, context: CUcontext) {
        if let Ok(mut arrays) = self.arrays.write() {
            arrays.retain(|_, a| a.context != context);
        }
    }
}

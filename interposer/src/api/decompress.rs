//! Decompression by a GPU's engine, which no device has here.
//!
//! How far an engine writes is not in a call's parameters, but in the compressed data. A checkpoint could not predict the writes.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;

use super::code;
use crate::state::client;

/// Answers as a device without the engine (`CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK` is 0), for which programs have a
/// way without it.
pub(crate) unsafe fn cuMemBatchDecompressAsync(
    _operations: *mut c_void,
    _count: usize,
    _flags: u32,
    _error_index: *mut usize,
    _stream: CUstream,
) -> CUresult {
    code(client::get().and_then(|client| {
        client.contexts.current()?;
        // Before it looks at anything else, as driver 580 does.
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }))
}

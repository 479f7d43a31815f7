//! Decompression by a GPU's engine, which no device has here.
//!
//! How far an engine writes is not in a call's parameters, but in the compressed data. A checkpoint could not predict the writes.

use std::ffi::c_void;

use rekindle_cuda_abi::raw::put_if;
use rekindle_cuda_abi::types::*;

use super::code;
use crate::call::stream_of;
use crate::state::client;

/// Answers as a device without the engine (`CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK` is 0), for which programs have a
/// way without it.
pub(crate) unsafe fn cuMemBatchDecompressAsync(
    operations: *mut c_void,
    count: usize,
    flags: u32,
    error_index: *mut usize,
    stream: CUstream,
) -> CUresult {
    code(client::get().and_then(|client| {
        client.contexts.current()?;
        // The error is not of a particular operation.
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put_if(error_index, usize::MAX) };
        if operations.is_null() || count == 0 || flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        stream_of(stream)?;
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }))
}

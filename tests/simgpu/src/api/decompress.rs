//! Decompression by an engine of the device's, which this device does not have, as an H200 does not.

use std::ffi::c_void;

use rekindle_cuda_abi::arguments::Out;
use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUresult, CUstream};

use crate::current;
use crate::status::{ensure, status};

pub fn cuMemBatchDecompressAsync(
    operations: *mut c_void,
    count: usize,
    flags: u32,
    error_index: Out<usize>,
    stream: CUstream,
) -> CUresult {
    status(|| {
        current::healthy()?;
        // The error is not of a particular operation.
        error_index.put_if(usize::MAX);
        ensure(!operations.is_null() && count > 0 && flags == 0, CUDA_ERROR_INVALID_VALUE)?;
        current::stream(stream)?;
        Err(CUDA_ERROR_NOT_SUPPORTED)
    })
}

//! Decompression by an engine of the device's, which this device does not have, as an H200 does not.

use std::ffi::c_void;

use rekindle_cuda_abi::arguments::Out;
use rekindle_cuda_abi::types::{CUDA_ERROR_NOT_SUPPORTED, CUresult, CUstream};

use crate::current;
use crate::status::status;

pub fn cuMemBatchDecompressAsync(
    _operations: *mut c_void,
    _count: usize,
    _flags: u32,
    _error_index: Out<usize>,
    _stream: CUstream,
) -> CUresult {
    status(|| {
        current::healthy()?;
        Err(CUDA_ERROR_NOT_SUPPORTED)
    })
}

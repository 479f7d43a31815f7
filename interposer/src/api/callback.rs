//! The functions that enqueue host callbacks.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;
use rekindle_graphs::hook;
use rekindle_wire::command::{HOST_FUNCTION, STREAM_CALLBACK};

use super::code;
use crate::operations::callback::enqueue;

pub(crate) unsafe fn cuLaunchHostFunc(stream: CUstream, function: *mut c_void, data: *mut c_void) -> CUresult {
    if !function.is_null()
        && let Some(answer) = hook::host(stream, function as u64, data as u64)
    {
        return answer;
    }
    code(enqueue(stream, function, data, HOST_FUNCTION))
}

pub(crate) unsafe fn cuStreamAddCallback(
    stream: CUstream,
    callback: *mut c_void,
    data: *mut c_void,
    flags: u32,
) -> CUresult {
    if flags != 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    code(hook::not_capturable(stream).and_then(|()| enqueue(stream, callback, data, STREAM_CALLBACK)))
}

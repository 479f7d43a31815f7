//! The functions for operations of streams on words of memory.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;
use rekindle_graphs::hook;
use rekindle_wire::command::{MAX_MEM_OPS, MemOp};

use super::code;
use crate::operations::words::{WAIT_32, WAIT_64, WRITE_32, WRITE_64, enqueue, operation};
use crate::state::client;

/// The calls' first version: `CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1` is 0 since CUDA 12, whatever the device.
fn first_version() -> CUresult {
    code(client::get().and_then(|client| client.contexts.current()).and(Err(CUDA_ERROR_NOT_SUPPORTED)))
}

fn one(stream: CUstream, operation: u32, address: u64, value: u64, flags: u32) -> CUresult {
    let params = CUstreamBatchMemOpParams { operation, address, value, flags, ..Default::default() };
    if let Some(answer) = hook::words(stream, || vec![params], 0) {
        return answer;
    }
    code(enqueue(stream, &[MemOp { operation, address, value, flags }]))
}

pub(crate) unsafe fn cuStreamWaitValue32_v2(
    stream: CUstream,
    address: CUdeviceptr,
    value: u32,
    flags: u32,
) -> CUresult {
    one(stream, WAIT_32, address, value.into(), flags)
}

pub(crate) unsafe fn cuStreamWaitValue32(_: CUstream, _: CUdeviceptr, _: u32, _: u32) -> CUresult {
    first_version()
}

pub(crate) unsafe fn cuStreamWaitValue64_v2(
    stream: CUstream,
    address: CUdeviceptr,
    value: u64,
    flags: u32,
) -> CUresult {
    one(stream, WAIT_64, address, value, flags)
}

pub(crate) unsafe fn cuStreamWaitValue64(_: CUstream, _: CUdeviceptr, _: u64, _: u32) -> CUresult {
    first_version()
}

pub(crate) unsafe fn cuStreamWriteValue32_v2(
    stream: CUstream,
    address: CUdeviceptr,
    value: u32,
    flags: u32,
) -> CUresult {
    one(stream, WRITE_32, address, value.into(), flags)
}

pub(crate) unsafe fn cuStreamWriteValue32(_: CUstream, _: CUdeviceptr, _: u32, _: u32) -> CUresult {
    first_version()
}

pub(crate) unsafe fn cuStreamWriteValue64_v2(
    stream: CUstream,
    address: CUdeviceptr,
    value: u64,
    flags: u32,
) -> CUresult {
    one(stream, WRITE_64, address, value, flags)
}

pub(crate) unsafe fn cuStreamWriteValue64(_: CUstream, _: CUdeviceptr, _: u64, _: u32) -> CUresult {
    first_version()
}

pub(crate) unsafe fn cuStreamBatchMemOp_v2(stream: CUstream, count: u32, params: *mut c_void, flags: u32) -> CUresult {
    if count as usize > MAX_MEM_OPS || flags != 0 || (count > 0 && params.is_null()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: the caller's array holds that many.
    let one = |i| unsafe { params.cast::<CUstreamBatchMemOpParams>().add(i).read_unaligned() };
    let list: Vec<CUstreamBatchMemOpParams> = (0..count as usize).map(one).collect();
    if let Some(answer) = hook::words(stream, || list.clone(), flags) {
        return answer;
    }
    let ops: Vec<MemOp> = list.iter().map(operation).collect();
    code(enqueue(stream, &ops))
}

pub(crate) unsafe fn cuStreamBatchMemOp(_: CUstream, count: u32, params: *mut c_void, flags: u32) -> CUresult {
    if count as usize > MAX_MEM_OPS || flags != 0 || (count > 0 && params.is_null()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    first_version()
}

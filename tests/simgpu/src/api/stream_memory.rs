//! Stream commands that write words of memory, or wait for them.

use std::ffi::c_void;

use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, CUdeviceptr, CUresult, CUstream,
    CUstreamBatchMemOpParams,
};
use rekindle_graphs::hook;

use crate::current;
use crate::status::{ensure, status, values};
use crate::word::{Word, perform_words, wait_word, write_word};

fn write(stream: u64, address: u64, wide: bool, value: u64, flags: u32) -> CUresult {
    /// `CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER`, the only flag.
    const NO_MEMORY_BARRIER: u32 = 1;
    status(|| {
        ensure(flags <= NO_MEMORY_BARRIER, CUDA_ERROR_INVALID_VALUE)?;
        let operation = if wide { 5 } else { 2 };
        let op = CUstreamBatchMemOpParams { operation, address, value, flags, ..Default::default() };
        if let Some(code) = captured(stream, &[op]) {
            return ensure(code == CUDA_SUCCESS, code);
        }
        write_word(&current::stream(stream)?, Word { address, wide }, value)
    })
}

fn wait(stream: u64, address: u64, wide: bool, value: u64, condition: u32) -> CUresult {
    status(|| {
        let operation = if wide { 4 } else { 1 };
        let op = CUstreamBatchMemOpParams { operation, address, value, flags: condition, ..Default::default() };
        match captured(stream, &[op]) {
            Some(code) => ensure(code == CUDA_SUCCESS, code),
            None => wait_word(&current::stream(stream)?, Word { address, wide }, value, condition),
        }
    })
}

/// The first version of the calls is not supported, as `CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1` has said since CUDA 12.
fn first_version() -> CUresult {
    status(|| current::current().and(Err(CUDA_ERROR_NOT_SUPPORTED)))
}

pub fn cuStreamWriteValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: u32) -> CUresult {
    write(stream, address, false, value.into(), flags)
}

pub fn cuStreamWriteValue32(_: CUstream, _: CUdeviceptr, _: u32, _: u32) -> CUresult {
    first_version()
}

pub fn cuStreamWriteValue64_v2(stream: CUstream, address: CUdeviceptr, value: u64, flags: u32) -> CUresult {
    write(stream, address, true, value, flags)
}

pub fn cuStreamWriteValue64(_: CUstream, _: CUdeviceptr, _: u64, _: u32) -> CUresult {
    first_version()
}

pub fn cuStreamWaitValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: u32) -> CUresult {
    wait(stream, address, false, value.into(), flags)
}

pub fn cuStreamWaitValue32(_: CUstream, _: CUdeviceptr, _: u32, _: u32) -> CUresult {
    first_version()
}

pub fn cuStreamWaitValue64_v2(stream: CUstream, address: CUdeviceptr, value: u64, flags: u32) -> CUresult {
    wait(stream, address, true, value, flags)
}

pub fn cuStreamWaitValue64(_: CUstream, _: CUdeviceptr, _: u64, _: u32) -> CUresult {
    first_version()
}

/// Operations that a capture takes.
fn captured(stream: CUstream, operations: &[CUstreamBatchMemOpParams]) -> Option<CUresult> {
    hook::words(stream, || operations.to_vec(), 0)
}

pub unsafe fn cuStreamBatchMemOp_v2(stream: CUstream, count: u32, operations: *mut c_void, flags: u32) -> CUresult {
    status(|| {
        ensure(count <= 256 && flags == 0, CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: null, or as many operations as the caller says.
        let list: Vec<CUstreamBatchMemOpParams> = unsafe { values(operations.cast(), count as usize) }?;
        match captured(stream, &list) {
            Some(code) => ensure(code == CUDA_SUCCESS, code),
            None => perform_words(&current::stream(stream)?, &list),
        }
    })
}

pub fn cuStreamBatchMemOp(_: CUstream, count: u32, operations: *mut c_void, flags: u32) -> CUresult {
    if count > 256 || flags != 0 || (count > 0 && operations.is_null()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    first_version()
}

//! Words of memory that streams write, and wait for.

use std::ffi::c_void;

use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUdeviceptr, CUresult, CUstream};

use crate::current;
use crate::status::{ensure, status};
use crate::word::{Word, wait_word, write_word};

fn write(stream: u64, address: u64, wide: bool, value: u64, flags: u32) -> CUresult {
    /// `CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER`, the one flag that there is.
    const NO_MEMORY_BARRIER: u32 = 1;
    status(|| {
        ensure(flags <= NO_MEMORY_BARRIER, CUDA_ERROR_INVALID_VALUE)?;
        write_word(&current::stream(stream)?, Word { address, wide }, value)
    })
}

fn wait(stream: u64, address: u64, wide: bool, value: u64, condition: u32) -> CUresult {
    status(|| wait_word(&current::stream(stream)?, Word { address, wide }, value, condition))
}

pub unsafe fn cuStreamWriteValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: u32) -> CUresult {
    write(stream, address, false, value.into(), flags)
}

pub unsafe fn cuStreamWriteValue32(stream: CUstream, address: CUdeviceptr, value: u32, flags: u32) -> CUresult {
    write(stream, address, false, value.into(), flags)
}

pub unsafe fn cuStreamWriteValue64_v2(stream: CUstream, address: CUdeviceptr, value: u64, flags: u32) -> CUresult {
    write(stream, address, true, value, flags)
}

pub unsafe fn cuStreamWriteValue64(stream: CUstream, address: CUdeviceptr, value: u64, flags: u32) -> CUresult {
    write(stream, address, true, value, flags)
}

pub unsafe fn cuStreamWaitValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: u32) -> CUresult {
    wait(stream, address, false, value.into(), flags)
}

pub unsafe fn cuStreamWaitValue32(stream: CUstream, address: CUdeviceptr, value: u32, flags: u32) -> CUresult {
    wait(stream, address, false, value.into(), flags)
}

pub unsafe fn cuStreamWaitValue64_v2(stream: CUstream, address: CUdeviceptr, value: u64, flags: u32) -> CUresult {
    wait(stream, address, true, value, flags)
}

pub unsafe fn cuStreamWaitValue64(stream: CUstream, address: CUdeviceptr, value: u64, flags: u32) -> CUresult {
    wait(stream, address, true, value, flags)
}

/// `CUstreamBatchMemOpParams`: a union of 48 bytes, of which every member begins alike.
#[repr(C)]
#[derive(Clone, Copy)]
struct Operation {
    operation: u32,
    address: u64,
    value: u64,
    flags: u32,
    alias: u64,
    rest: u64,
}

pub unsafe fn cuStreamBatchMemOp_v2(stream: CUstream, count: u32, operations: *mut c_void, flags: u32) -> CUresult {
    const BARRIER: u32 = 6;
    const FLUSH: u32 = 3;
    status(|| {
        ensure(count <= 256 && flags == 0, CUDA_ERROR_INVALID_VALUE)?;
        ensure(count == 0 || !operations.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let stream = current::stream(stream)?;
        for i in 0..count as usize {
            let op = unsafe { operations.cast::<Operation>().add(i).read_unaligned() };
            let word = |wide| Word { address: op.address, wide };
            match op.operation {
                1 => wait_word(&stream, word(false), op.value & 0xffff_ffff, op.flags)?,
                2 => write_word(&stream, word(false), op.value & 0xffff_ffff)?,
                4 => wait_word(&stream, word(true), op.value, op.flags)?,
                5 => write_word(&stream, word(true), op.value)?,
                // The operations of a stream follow each other anyway.
                BARRIER | FLUSH => {}
                _ => return Err(CUDA_ERROR_INVALID_VALUE),
            }
        }
        Ok(())
    })
}

pub unsafe fn cuStreamBatchMemOp(stream: CUstream, count: u32, operations: *mut c_void, flags: u32) -> CUresult {
    unsafe { cuStreamBatchMemOp_v2(stream, count, operations, flags) }
}

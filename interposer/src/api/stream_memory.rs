//! Operations of streams on words of memory.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;
use rekindle_graphs::hook;
use rekindle_wire::codec::Writer;
use rekindle_wire::command::{MAX_MEM_OPS, MEM_OPS, MemOp, MemOps};

use super::{check, code};
use crate::call::{Call, stream_of};
use crate::state::client;

const WAIT_32: u32 = 1;
const WRITE_32: u32 = 2;
const FLUSH: u32 = 3;
const WAIT_64: u32 = 4;
const WRITE_64: u32 = 5;
const BARRIER: u32 = 6;

/// What the driver says at once of an operation.
pub(crate) fn judge(op: &MemOp) -> Result<(), CUresult> {
    // How to compare, and whether to flush remote writes after it.
    const WAIT_FLAGS: u32 = 0x4000_0003;
    const WRITE_FLAGS: u32 = 1;
    let allowed = match op.operation {
        WAIT_32 | WAIT_64 => WAIT_FLAGS,
        WRITE_32 | WRITE_64 | BARRIER => WRITE_FLAGS,
        FLUSH => 0,
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    let width = op.width();
    let known = || client::get().map(|client| client.memory.is_direct(op.address, width));
    if op.flags & !allowed != 0 || (width > 0 && (!op.address.is_multiple_of(width) || !known()?)) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(())
}

/// Enqueues operations, whatever captures.
pub(crate) fn enqueue(stream: CUstream, ops: &[MemOp]) -> Result<(), CUresult> {
    let mut call = Call::in_context(MEM_OPS)?;
    let stream = stream_of(stream)?;
    ops.iter().try_for_each(judge)?;
    if ops.is_empty() {
        return Ok(());
    }
    let mut words = Writer::new();
    ops.iter().for_each(|op| op.write(&mut words));
    call.put(&MemOps { stream, operations: words.bytes() });
    check(call.send())
}

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

/// An operation as the caller describes it.
pub(crate) fn operation(p: &CUstreamBatchMemOpParams) -> MemOp {
    match p.operation {
        FLUSH | BARRIER => MemOp { operation: p.operation, address: 0, value: 0, flags: p.flags_of_none },
        WAIT_32 | WRITE_32 => {
            let value = p.value & 0xffff_ffff;
            MemOp { operation: p.operation, address: p.address, value, flags: p.flags }
        }
        _ => MemOp { operation: p.operation, address: p.address, value: p.value, flags: p.flags },
    }
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

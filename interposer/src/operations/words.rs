//! Operations of streams on words of memory.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Writer;
use rekindle_wire::command::{MEM_OPS, MemOp, MemOps};

use crate::call::{Call, stream_of};
use crate::state::client;

pub(crate) const WAIT_32: u32 = 1;
pub(crate) const WRITE_32: u32 = 2;
const FLUSH: u32 = 3;
pub(crate) const WAIT_64: u32 = 4;
pub(crate) const WRITE_64: u32 = 5;
const BARRIER: u32 = 6;

/// Checks what the driver checks before it enqueues an operation.
pub(crate) fn check_operation(op: &MemOp) -> Result<(), CUresult> {
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
    ops.iter().try_for_each(check_operation)?;
    if ops.is_empty() {
        return Ok(());
    }
    let mut words = Writer::new();
    ops.iter().for_each(|op| op.write(&mut words));
    call.put(&MemOps { stream, operations: words.bytes() });
    check(call.send())
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

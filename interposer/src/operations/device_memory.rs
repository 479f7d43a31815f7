//! Device memory, which lies in windows of addresses that this process and the worker reserve alike.

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{MEM_ALLOC, MemAlloc, WINDOW_FULL, WINDOW_RESERVED, WindowReserved};

use crate::call::Call;
use crate::state::client::Client;
use crate::state::memory::Allocation;

/// Allocates memory of a device in a context. `begin` begins a call in that context.
pub(crate) fn allocate(
    client: &Client,
    (context, device): (CUcontext, usize),
    bytes: u64,
    begin: impl Fn(u16) -> Result<Call, CUresult>,
) -> Result<u64, CUresult> {
    let base = loop {
        let mut call = begin(MEM_ALLOC)?;
        call.put(&MemAlloc { bytes });
        let (result, mut reply) = call.wait();
        let address = reply.word();
        if result == WINDOW_FULL {
            reserve_window(client, device, address.ok_or(CUDA_ERROR_UNKNOWN)?)?;
            continue;
        }
        check(result)?;
        break address.ok_or(CUDA_ERROR_UNKNOWN)?;
    };
    client.memory.insert(Allocation::Device { base, size: bytes, device, context });
    Ok(base)
}

/// Reserves more of a device's window, as the worker has asked for, and tells the worker.
pub(crate) fn reserve_window(client: &Client, device: usize, end: u64) -> Result<(), CUresult> {
    let end = client.memory.reserve(device, end).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let mut call = Call::new(WINDOW_RESERVED)?;
    call.put(&WindowReserved { device: device as u64, end });
    check(call.send())
}

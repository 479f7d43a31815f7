//! Device memory.

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{MEM_FREE, MEM_INFO, MemFree, MemInfo};

use super::{check, code, put, put_if};
use crate::call::{Call, standing_error};
use crate::operations::{device_memory, managed};
use crate::state::client;
use crate::state::memory::Allocation;

pub(crate) unsafe fn cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytes: usize) -> CUresult {
    code(client::get().and_then(|client| {
        if dptr.is_null() || bytes == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let (context, known) = client.contexts.current()?;
        let base = device_memory::allocate(client, (context, known.device), bytes as u64, Call::in_context)?;
        // SAFETY: not null, so writable by cuda.h's contract.
        unsafe { put(dptr, base) }
    }))
}

/// The pitch that the driver gives: rows start at multiples of 512 bytes.
const PITCH: usize = 512;

pub(crate) unsafe fn cuMemAllocPitch_v2(
    dptr: *mut CUdeviceptr,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: u32,
) -> CUresult {
    if pitch.is_null() || width == 0 || height == 0 || !matches!(element, 4 | 8 | 16) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let row = width.next_multiple_of(PITCH);
    let Some(bytes) = row.checked_mul(height) else { return CUDA_ERROR_OUT_OF_MEMORY };
    // SAFETY: the caller's promise by cuda.h.
    let result = unsafe { cuMemAlloc_v2(dptr, bytes) };
    if result == CUDA_SUCCESS {
        // SAFETY: not null.
        unsafe { put_if(pitch, row) };
    }
    result
}

pub(crate) unsafe fn cuMemFree_v2(dptr: CUdeviceptr) -> CUresult {
    code(client::get().and_then(|client| {
        standing_error(client)?;
        // Without a current context, too: the address says whose it is.
        if dptr == 0 {
            return Ok(());
        }
        if let Some(answer) = rekindle_graphs::hook::free(dptr) {
            return check(answer);
        }
        if let Some(freed) = super::pool_sharing::free(client, dptr) {
            return freed;
        }
        match client.memory.at(dptr) {
            Some(Allocation::Device { base, .. } | Allocation::Pooled { base, .. }) if base == dptr => {}
            Some(Allocation::Managed { .. }) => return managed::free(client, dptr),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        let mut call = Call::new(MEM_FREE)?;
        call.put(&MemFree { address: dptr });
        // Forgotten before the worker frees it: another thread may be given the address at once.
        let forgotten = client.memory.remove(dptr);
        check(call.wait().0).inspect_err(|_| {
            if let Some(allocation) = forgotten {
                client.memory.insert(allocation);
            }
        })
    }))
}

pub(crate) unsafe fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
    code(Call::in_context(MEM_INFO).and_then(|mut call| {
        call.put(&MemInfo {});
        let (result, reply) = call.wait();
        if result != CUDA_SUCCESS {
            return Err(result);
        }
        let mut reply = reply.rest();
        let (Ok(is_free), Ok(is_there)) = (reply.word(), reply.word()) else { return Err(CUDA_ERROR_UNKNOWN) };
        // SAFETY: the caller's promise by cuda.h.
        unsafe {
            put_if(free, is_free as usize);
            put_if(total, is_there as usize);
        }
        Ok(())
    }))
}

pub(crate) unsafe fn cuMemGetAddressRange_v2(base: *mut CUdeviceptr, size: *mut usize, dptr: CUdeviceptr) -> CUresult {
    code(client::get().and_then(|client| {
        client.contexts.current()?;
        let range = client.memory.at(dptr).ok_or(CUDA_ERROR_NOT_FOUND)?.range();
        // SAFETY: the caller's promise by cuda.h.
        unsafe {
            put_if(base, range.start);
            put_if(size, (range.end - range.start) as usize);
        }
        Ok(())
    }))
}

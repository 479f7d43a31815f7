//! The functions for pinned host memory.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;

use super::context::in_first_form;
use super::{check, code, put};
use crate::operations::pinned;
use crate::state::client;
use crate::state::memory::Allocation;

/// `CU_MEMHOSTALLOC_PORTABLE | DEVICEMAP | WRITECOMBINED`.
const FLAGS: u32 = 7;

pub(crate) unsafe fn cuMemHostAlloc(out: *mut *mut c_void, bytes: usize, flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        if out.is_null() || flags & !FLAGS != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let base = pinned::allocate(client, bytes as u64, flags)?;
        // SAFETY: not null, so writable by cuda.h's contract.
        unsafe { put(out, base as *mut c_void) }
    }))
}

pub(crate) unsafe fn cuMemAllocHost_v2(out: *mut *mut c_void, bytes: usize) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuMemHostAlloc(out, bytes, 0) }
}

/// The form before CUDA 3.2.
pub(crate) unsafe fn cuMemAllocHost(out: *mut *mut c_void, bytes: u32) -> CUresult {
    code(client::get().and_then(in_first_form).and_then(|()| {
        // SAFETY: the same contract.
        check(unsafe { cuMemAllocHost_v2(out, bytes as usize) })
    }))
}

pub(crate) unsafe fn cuMemFreeHost(pointer: *mut c_void) -> CUresult {
    code(client::get().and_then(|client| pinned::free(client, pointer as u64)))
}

pub(crate) unsafe fn cuMemHostGetFlags(out: *mut u32, host: *mut c_void) -> CUresult {
    const MAPPED: u32 = 2;
    code(client::get().and_then(|client| match client.memory.at(host as u64) {
        // SAFETY: the caller's promise by cuda.h. All pinned memory is mapped for the device.
        Some(Allocation::Pinned { flags, .. }) => unsafe { put(out, flags | MAPPED) },
        // SAFETY: as above.
        Some(Allocation::Managed { .. }) => unsafe { put(out, MAPPED) },
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }))
}

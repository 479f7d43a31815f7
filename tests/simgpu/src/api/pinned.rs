//! Page-locked and registered host memory.

use std::ffi::c_void;

use rekindle_cuda_abi::arguments::Out;
use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUdeviceptr, CUresult};

use crate::current;
use crate::memory::pinned;
use crate::memory::space::{self, Kind};
use crate::status::{Result, ensure, status};

/// `CU_MEMHOSTALLOC_DEVICEMAP`: with unified addresses, all page-locked memory is mapped.
const MAPPED: u32 = 2;

pub fn cuMemHostAlloc(out: Out<*mut c_void>, bytes: usize, flags: u32) -> CUresult {
    status(|| {
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let context = current::healthy()?;
        if bytes == 0 {
            return out.put(std::ptr::null_mut());
        }
        out.put(pinned::allocate(&context, bytes, flags)? as *mut c_void)
    })
}

pub fn cuMemAllocHost_v2(out: Out<*mut c_void>, bytes: usize) -> CUresult {
    cuMemHostAlloc(out, bytes, 0)
}

pub fn cuMemAllocHost(out: Out<*mut c_void>, bytes: u32) -> CUresult {
    match current::in_first_form() {
        Ok(()) => cuMemHostAlloc(out, bytes as usize, 0),
        Err(error) => error,
    }
}

/// Waits, as for device memory, for commands that may still use the memory.
pub fn cuMemFreeHost(pointer: *mut c_void) -> CUresult {
    status(|| {
        if pointer.is_null() {
            return Ok(());
        }
        current::healthy()?.synchronize()?;
        pinned::free(pointer as u64)
    })
}

pub fn cuMemHostRegister(pointer: *mut c_void, bytes: usize, flags: u32) -> CUresult {
    cuMemHostRegister_v2(pointer, bytes, flags)
}

pub fn cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: u32) -> CUresult {
    status(|| {
        let context = current::healthy()?;
        pinned::register(&context, pointer as u64, bytes, flags)
    })
}

pub fn cuMemHostUnregister(pointer: *mut c_void) -> CUresult {
    status(|| {
        current::healthy()?;
        let region = space::find(pointer as u64).filter(|r| matches!(r.kind, Kind::Registered(_)));
        ensure(region.is_none_or(|r| r.base == pointer as u64), CUDA_ERROR_INVALID_VALUE)?;
        pinned::unregister(pointer as u64)
    })
}

fn host_flags(pointer: u64) -> Result<u32> {
    match space::find(pointer).map(|region| region.kind) {
        Some(Kind::Pinned(flags) | Kind::Registered(flags)) => Ok(flags),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

pub fn cuMemHostGetDevicePointer_v2(out: Out<CUdeviceptr>, pointer: *mut c_void, flags: u32) -> CUresult {
    status(|| {
        ensure(flags == 0, CUDA_ERROR_INVALID_VALUE)?;
        current::healthy()?;
        host_flags(pointer as u64)?;
        out.put(pointer as u64)
    })
}

/// Only for memory from `cuMemHostAlloc`.
pub fn cuMemHostGetFlags(out: Out<u32>, pointer: *mut c_void) -> CUresult {
    status(|| {
        current::healthy()?;
        match space::find(pointer as u64).map(|region| region.kind) {
            Some(Kind::Pinned(flags)) => out.put(flags | MAPPED),
            Some(kind) if kind.is_managed() => out.put(MAPPED),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    })
}

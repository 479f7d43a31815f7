//! The free memory of GPUs.

use std::ffi::c_void;

use rekindle_wire::control::{Reply, Request};
use rekindle_wire::nvml::Memory;

use super::put;
use crate::result::*;
use crate::{Answered, daemon, state};

/// `nvmlMemory_t`.
#[repr(C)]
struct MemoryV1 {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

const VERSION_2: u32 = 2 << 24 | size_of::<MemoryV2>() as u32;

fn memory(device: usize) -> Result<Memory, u32> {
    let gpu = state::facts()?.gpu(device)?.0;
    match daemon::ask(&Request::GpuMemory { gpu })? {
        Reply::GpuMemory(memory) => Ok(memory),
        _ => Err(ERROR_UNKNOWN),
    }
}

pub(crate) unsafe fn nvmlDeviceGetMemoryInfo(device: usize, memory_out: *mut c_void) -> Answered {
    state::facts()?.gpu(device)?;
    if memory_out.is_null() {
        return Err(ERROR_INVALID_ARGUMENT);
    }
    let Memory { total, free, .. } = memory(device)?;
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put(memory_out.cast(), MemoryV1 { total, free, used: total.saturating_sub(free) }) }
}

pub(crate) unsafe fn nvmlDeviceGetMemoryInfo_v2(device: usize, memory_out: *mut c_void) -> Answered {
    state::facts()?.gpu(device)?;
    if memory_out.is_null() {
        return Err(ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: not null, so a structure that begins with its version by the caller's promise.
    if unsafe { memory_out.cast::<u32>().read_unaligned() } != VERSION_2 {
        return Err(ERROR_ARGUMENT_VERSION_MISMATCH);
    }
    let Memory { total, free, reserved } = memory(device)?;
    let used = total.saturating_sub(free).saturating_sub(reserved);
    let filled = MemoryV2 { version: VERSION_2, total, reserved, free, used };
    // SAFETY: of this version, so all of it is there.
    unsafe { put(memory_out.cast(), filled) }
}

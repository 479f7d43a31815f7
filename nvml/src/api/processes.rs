//! The processes that compute on a GPU. Rekindle supports neither graphics nor MPS.

use std::ffi::c_void;

use rekindle_wire::control::{Reply, Request};
use rekindle_wire::nvml::Process;

use super::put;
use crate::result::*;
use crate::{Answered, daemon, state};

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
struct ProcessV1 {
    pid: u32,
    memory: u64,
}

/// `nvmlProcessInfo_v2_t`, and `nvmlProcessInfo_t` of today.
#[repr(C)]
struct ProcessV2 {
    pid: u32,
    memory: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// The instance of a GPU that is not partitioned.
const NO_INSTANCE: u32 = u32::MAX;

fn computing(device: usize) -> Result<Vec<Process>, u32> {
    let gpu = state::facts()?.gpu(device)?.0;
    match daemon::ask(&Request::GpuProcesses { gpu })? {
        Reply::GpuProcesses(processes) => Ok(processes),
        _ => Err(ERROR_UNKNOWN),
    }
}

/// Writes the processes if there is room for all, and their number in any case.
///
/// # Safety
/// `count` is null, or holds the number of elements for which `out` has room.
unsafe fn list<T>(found: Vec<Process>, count: *mut u32, out: *mut c_void, as_one: impl Fn(Process) -> T) -> Answered {
    if count.is_null() {
        return Err(ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: the caller's promise.
    let room = unsafe { count.read_unaligned() };
    // SAFETY: the caller's promise.
    unsafe { put(count, found.len() as u32)? };
    if found.is_empty() {
        return Ok(());
    }
    if (room as usize) < found.len() {
        return Err(ERROR_INSUFFICIENT_SIZE);
    }
    if out.is_null() {
        return Err(ERROR_INVALID_ARGUMENT);
    }
    for (at, process) in found.into_iter().enumerate() {
        // SAFETY: there is room for so many.
        unsafe { out.cast::<T>().add(at).write_unaligned(as_one(process)) };
    }
    Ok(())
}

fn v1(process: Process) -> ProcessV1 {
    ProcessV1 { pid: process.pid, memory: process.memory }
}

fn v2(process: Process) -> ProcessV2 {
    ProcessV2 { pid: process.pid, memory: process.memory, gpu_instance: NO_INSTANCE, compute_instance: NO_INSTANCE }
}

pub(crate) unsafe fn nvmlDeviceGetComputeRunningProcesses(d: usize, count: *mut u32, infos: *mut c_void) -> Answered {
    // SAFETY: the caller's promise by nvml.h.
    unsafe { list(computing(d)?, count, infos, v1) }
}

pub(crate) unsafe fn nvmlDeviceGetComputeRunningProcesses_v2(d: usize, n: *mut u32, infos: *mut c_void) -> Answered {
    // SAFETY: the caller's promise by nvml.h.
    unsafe { list(computing(d)?, n, infos, v2) }
}

pub(crate) unsafe fn nvmlDeviceGetComputeRunningProcesses_v3(d: usize, n: *mut u32, infos: *mut c_void) -> Answered {
    // SAFETY: the caller's promise by nvml.h.
    unsafe { list(computing(d)?, n, infos, v2) }
}

/// Reports no processes.
///
/// # Safety
/// `count` is null or may be written.
unsafe fn no_processes(device: usize, count: *mut u32) -> Answered {
    state::facts()?.gpu(device)?;
    // SAFETY: the caller's promise.
    unsafe { put(count, 0) }
}

pub(crate) unsafe fn nvmlDeviceGetGraphicsRunningProcesses(d: usize, count: *mut u32, _: *mut c_void) -> Answered {
    // SAFETY: the caller's promise by nvml.h.
    unsafe { no_processes(d, count) }
}

pub(crate) unsafe fn nvmlDeviceGetGraphicsRunningProcesses_v2(d: usize, count: *mut u32, _: *mut c_void) -> Answered {
    // SAFETY: the caller's promise by nvml.h.
    unsafe { no_processes(d, count) }
}

pub(crate) unsafe fn nvmlDeviceGetGraphicsRunningProcesses_v3(d: usize, count: *mut u32, _: *mut c_void) -> Answered {
    // SAFETY: the caller's promise by nvml.h.
    unsafe { no_processes(d, count) }
}

pub(crate) unsafe fn nvmlDeviceGetMPSComputeRunningProcesses(d: usize, count: *mut u32, _: *mut c_void) -> Answered {
    // SAFETY: the caller's promise by nvml.h.
    unsafe { no_processes(d, count) }
}

pub(crate) unsafe fn nvmlDeviceGetMPSComputeRunningProcesses_v2(d: usize, count: *mut u32, _: *mut c_void) -> Answered {
    // SAFETY: the caller's promise by nvml.h.
    unsafe { no_processes(d, count) }
}

pub(crate) unsafe fn nvmlDeviceGetMPSComputeRunningProcesses_v3(d: usize, count: *mut u32, _: *mut c_void) -> Answered {
    // SAFETY: the caller's promise by nvml.h.
    unsafe { no_processes(d, count) }
}

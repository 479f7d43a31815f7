//! Copies. What the worker reaches (device memory, globals, pinned memory) it copies in place; ordinary host memory
//! goes through staging.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::COPY;

use super::{check, code, stream};
use crate::client::{self, Call};
use crate::copy;

/// What one end of a copy is to the worker.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Device memory or a global.
    Device,
    /// Pinned host memory.
    Pinned,
    /// Host memory that only the application reaches.
    Host,
}

fn host_place(address: u64, bytes: usize) -> Result<Place, CUresult> {
    Ok(if client::get()?.memory.is_direct(address, bytes as u64) { Place::Pinned } else { Place::Host })
}

fn device_place(address: u64, bytes: usize) -> Result<Place, CUresult> {
    let client = client::get()?;
    if !client.memory.is_direct(address, bytes as u64) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(Place::Device)
}

/// Whether a function returns before the copy is done.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    /// `...Async`.
    No,
    /// The others, where the driver waits.
    Yes,
}

/// # Safety
/// Host ends hold `bytes` bytes.
unsafe fn transfer(
    (target, target_is): (u64, Place),
    (source, source_is): (u64, Place),
    bytes: usize,
    on: CUstream,
    wait: Wait,
) -> Result<(), CUresult> {
    client::get()?.contexts.current()?;
    if bytes == 0 {
        return Ok(());
    }
    match (target_is, source_is) {
        (Place::Device, Place::Host) => {
            // SAFETY: the caller's promise. When it returns, the bytes have been taken, as with the driver.
            check(unsafe { copy::to_device(target, source as *const u8, bytes, on) })?;
            // A synchronous copy has also arrived: the driver promises less, but programs go on in another stream.
            if wait == Wait::Yes {
                // SAFETY: no pointers.
                check(unsafe { stream::cuStreamSynchronize(on) })?;
            }
            Ok(())
        }
        // SAFETY: the caller's promise.
        (Place::Host, Place::Device) => check(unsafe { copy::to_host(target as *mut u8, source, bytes, on) }),
        (Place::Host | Place::Pinned, Place::Host) | (Place::Host, Place::Pinned) => {
            // SAFETY: no pointers.
            check(unsafe { stream::cuStreamSynchronize(on) })?;
            // SAFETY: the caller's promise; overlapping is allowed here as in the driver.
            unsafe { std::ptr::copy(source as *const u8, target as *mut u8, bytes) };
            Ok(())
        }
        _ => {
            let mut call = Call::in_context(COPY)?;
            call.word(target);
            call.word(source);
            call.word(bytes as u64);
            call.stream(on)?;
            check(call.send())?;
            // Between device memories the driver does not make the host wait.
            if wait == Wait::Yes && (target_is, source_is) != (Place::Device, Place::Device) {
                // SAFETY: no pointers.
                check(unsafe { stream::cuStreamSynchronize(on) })?;
            }
            Ok(())
        }
    }
}

/// # Safety
/// `source` holds `bytes` bytes.
unsafe fn host_to_device(target: u64, source: *const c_void, bytes: usize, on: CUstream, wait: Wait) -> CUresult {
    code(device_place(target, bytes).and_then(|d| {
        let h = host_place(source as u64, bytes)?;
        // SAFETY: the caller's promise.
        unsafe { transfer((target, d), (source as u64, h), bytes, on, wait) }
    }))
}

/// # Safety
/// `target` has room for `bytes` bytes.
unsafe fn device_to_host(target: *mut c_void, source: u64, bytes: usize, on: CUstream, wait: Wait) -> CUresult {
    code(device_place(source, bytes).and_then(|d| {
        let h = host_place(target as u64, bytes)?;
        // SAFETY: the caller's promise.
        unsafe { transfer((target as u64, h), (source, d), bytes, on, wait) }
    }))
}

fn device_to_device(target: u64, source: u64, bytes: usize, on: CUstream) -> CUresult {
    code(device_place(target, bytes).and_then(|t| {
        let s = device_place(source, bytes)?;
        // SAFETY: no host memory.
        unsafe { transfer((target, t), (source, s), bytes, on, Wait::No) }
    }))
}

/// # Safety
/// Whichever ends are host memory hold `bytes` bytes.
unsafe fn any_to_any(target: u64, source: u64, bytes: usize, on: CUstream, wait: Wait) -> CUresult {
    use crate::state::memory::Allocation;
    let place = |address| {
        let client = client::get()?;
        Ok(match client.memory.at(address) {
            Some(Allocation::Device { .. } | Allocation::Global { .. }) => device_place(address, bytes)?,
            _ => host_place(address, bytes)?,
        })
    };
    // SAFETY: the caller's promise.
    code(place(target).and_then(|t| unsafe { transfer((target, t), (source, place(source)?), bytes, on, wait) }))
}

pub(crate) unsafe fn cuMemcpyHtoD_v2(target: CUdeviceptr, source: *const c_void, bytes: usize) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { host_to_device(target, source, bytes, 0, Wait::Yes) }
}

pub(crate) unsafe fn cuMemcpyHtoDAsync_v2(
    target: CUdeviceptr,
    source: *const c_void,
    bytes: usize,
    on: CUstream,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { host_to_device(target, source, bytes, on, Wait::No) }
}

pub(crate) unsafe fn cuMemcpyDtoH_v2(target: *mut c_void, source: CUdeviceptr, bytes: usize) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { device_to_host(target, source, bytes, 0, Wait::Yes) }
}

pub(crate) unsafe fn cuMemcpyDtoHAsync_v2(
    target: *mut c_void,
    source: CUdeviceptr,
    bytes: usize,
    on: CUstream,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { device_to_host(target, source, bytes, on, Wait::No) }
}

pub(crate) unsafe fn cuMemcpyDtoD_v2(target: CUdeviceptr, source: CUdeviceptr, bytes: usize) -> CUresult {
    device_to_device(target, source, bytes, 0)
}

pub(crate) unsafe fn cuMemcpyDtoDAsync_v2(
    target: CUdeviceptr,
    source: CUdeviceptr,
    bytes: usize,
    on: CUstream,
) -> CUresult {
    device_to_device(target, source, bytes, on)
}

pub(crate) unsafe fn cuMemcpy(target: CUdeviceptr, source: CUdeviceptr, bytes: usize) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { any_to_any(target, source, bytes, 0, Wait::Yes) }
}

pub(crate) unsafe fn cuMemcpyAsync(target: CUdeviceptr, source: CUdeviceptr, bytes: usize, on: CUstream) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { any_to_any(target, source, bytes, on, Wait::No) }
}

pub(crate) unsafe fn cuMemcpyPeer(
    target: CUdeviceptr,
    _target_context: CUcontext,
    source: CUdeviceptr,
    _source_context: CUcontext,
    bytes: usize,
) -> CUresult {
    device_to_device(target, source, bytes, 0)
}

pub(crate) unsafe fn cuMemcpyPeerAsync(
    target: CUdeviceptr,
    _target_context: CUcontext,
    source: CUdeviceptr,
    _source_context: CUcontext,
    bytes: usize,
    on: CUstream,
) -> CUresult {
    device_to_device(target, source, bytes, on)
}

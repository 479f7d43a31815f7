//! Copies. What the worker reaches (device memory, globals, pinned memory) it copies in place; ordinary host memory
//! goes through the bounce buffer.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;
use rekindle_graphs::hook;
use rekindle_wire::command::{COPY, CopyMemory};

use super::{check, code};
use crate::call::{Call, standing_error, stream_of};
use crate::operations::{copy, moving, stream};
use crate::state::client;
use crate::state::memory::Allocation;

/// The kind of memory at one end of a copy, as the worker sees it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Device memory or a global.
    Device,
    /// Pinned host memory.
    Pinned,
    /// Host memory that only the application reaches.
    Host,
}

/// The worker's address of host memory, and its kind: registered memory has another address there.
fn host_place(address: u64, bytes: usize) -> Result<(u64, Place), CUresult> {
    let memory = &client::get()?.memory;
    if let Some(at) = memory.reached_at(address, bytes as u64) {
        // Where it moves, the device gets it.
        let moves = moving::moves(at) && matches!(memory.at(address), Some(Allocation::Managed { .. }));
        return Ok((at, if moves { Place::Device } else { Place::Pinned }));
    }
    // Reserved addresses without an allocation hold no memory.
    let nowhere = address == 0 || memory.is_reserved(address);
    if nowhere { Err(CUDA_ERROR_INVALID_VALUE) } else { Ok((address, Place::Host)) }
}

fn device_place(address: u64, bytes: usize) -> Result<Place, CUresult> {
    let client = client::get()?;
    if !client.memory.is_direct(address, bytes as u64) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(Place::Device)
}

/// Checks what the driver checks before it looks at addresses: the context and its errors. Returns whether there are bytes to
/// copy.
fn anything(bytes: usize) -> Result<bool, CUresult> {
    let client = client::get()?;
    client.contexts.current()?;
    standing_error(client)?;
    Ok(bytes > 0)
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
    match (target_is, source_is) {
        (Place::Device, Place::Host) => {
            // SAFETY: the caller's promise. When it returns, the bytes have been taken, as with the driver.
            check(unsafe { copy::to_device(target, source as *const u8, bytes, on) })?;
            // A synchronous copy has also arrived: the driver promises less, but programs go on in another stream.
            if wait == Wait::Yes {
                stream::synchronize(on)?;
            }
            Ok(())
        }
        // SAFETY: the caller's promise.
        (Place::Host, Place::Device) => check(unsafe { copy::to_host(target as *mut u8, source, bytes, on) }),
        (Place::Host | Place::Pinned, Place::Host) | (Place::Host, Place::Pinned) => {
            stream::synchronize(on)?;
            // SAFETY: the caller's promise; overlapping is allowed here as in the driver.
            unsafe { std::ptr::copy(source as *const u8, target as *mut u8, bytes) };
            Ok(())
        }
        _ => {
            let mut call = Call::in_context(COPY)?;
            let stream = stream_of(on)?;
            call.put(&CopyMemory { destination: target, source, bytes: bytes as u64, stream });
            check(call.send())?;
            // Between device memories the driver does not make the host wait, unless that was asked for.
            let memory = &client::get()?.memory;
            let between_devices = (target_is, source_is) == (Place::Device, Place::Device);
            let must = || memory.is_synchronous(target) || memory.is_synchronous(source);
            if wait == Wait::Yes && (!between_devices || must()) {
                stream::synchronize(on)?;
            }
            Ok(())
        }
    }
}

/// The answer of a copy that a capture takes. An end is its kind of memory, and where it is; the destination first.
fn captured((target, source): ((u32, u64), (u32, u64)), bytes: usize, on: CUstream, wait: Wait) -> Option<CUresult> {
    if wait == Wait::Yes { None } else { hook::copy_bytes(on, target, source, bytes) }
}

/// # Safety
/// `source` holds `bytes` bytes.
unsafe fn host_to_device(target: u64, source: *const c_void, bytes: usize, on: CUstream, wait: Wait) -> CUresult {
    let ends = ((CU_MEMORYTYPE_DEVICE, target), (CU_MEMORYTYPE_HOST, source as u64));
    if let Some(answer) = captured(ends, bytes, on, wait) {
        return answer;
    }
    code(anything(bytes).and_then(|any| {
        if !any {
            return Ok(());
        }
        let (d, h) = (device_place(target, bytes)?, host_place(source as u64, bytes)?);
        // SAFETY: the caller's promise.
        unsafe { transfer((target, d), h, bytes, on, wait) }
    }))
}

/// # Safety
/// `target` has room for `bytes` bytes.
unsafe fn device_to_host(target: *mut c_void, source: u64, bytes: usize, on: CUstream, wait: Wait) -> CUresult {
    let ends = ((CU_MEMORYTYPE_HOST, target as u64), (CU_MEMORYTYPE_DEVICE, source));
    if let Some(answer) = captured(ends, bytes, on, wait) {
        return answer;
    }
    code(anything(bytes).and_then(|any| {
        if !any {
            return Ok(());
        }
        let (d, h) = (device_place(source, bytes)?, host_place(target as u64, bytes)?);
        // SAFETY: the caller's promise.
        unsafe { transfer(h, (source, d), bytes, on, wait) }
    }))
}

fn device_to_device(target: u64, source: u64, bytes: usize, on: CUstream, wait: Wait) -> CUresult {
    code(anything(bytes).and_then(|any| {
        if !any {
            return Ok(());
        }
        let (t, s) = (device_place(target, bytes)?, device_place(source, bytes)?);
        // SAFETY: no host memory.
        unsafe { transfer((target, t), (source, s), bytes, on, wait) }
    }))
}

/// # Safety
/// Whichever ends are host memory hold `bytes` bytes.
unsafe fn any_to_any(target: u64, source: u64, bytes: usize, on: CUstream, wait: Wait) -> CUresult {
    let ends = ((CU_MEMORYTYPE_UNIFIED, target), (CU_MEMORYTYPE_UNIFIED, source));
    if let Some(answer) = captured(ends, bytes, on, wait) {
        return answer;
    }
    let place = |address| -> Result<(u64, Place), CUresult> {
        let client = client::get()?;
        Ok(match client.memory.at(address) {
            Some(allocation) if allocation.device().is_some() => (address, device_place(address, bytes)?),
            _ => host_place(address, bytes)?,
        })
    };
    code(anything(bytes).and_then(|any| {
        if !any {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { transfer(place(target)?, place(source)?, bytes, on, wait) }
    }))
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
    device_to_device(target, source, bytes, 0, Wait::Yes)
}

pub(crate) unsafe fn cuMemcpyDtoDAsync_v2(
    target: CUdeviceptr,
    source: CUdeviceptr,
    bytes: usize,
    on: CUstream,
) -> CUresult {
    let ends = ((CU_MEMORYTYPE_DEVICE, target), (CU_MEMORYTYPE_DEVICE, source));
    captured(ends, bytes, on, Wait::No).unwrap_or_else(|| device_to_device(target, source, bytes, on, Wait::No))
}

pub(crate) unsafe fn cuMemcpy(target: CUdeviceptr, source: CUdeviceptr, bytes: usize) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { any_to_any(target, source, bytes, 0, Wait::Yes) }
}

pub(crate) unsafe fn cuMemcpyAsync(target: CUdeviceptr, source: CUdeviceptr, bytes: usize, on: CUstream) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { any_to_any(target, source, bytes, on, Wait::No) }
}

/// The error of the contexts of a copy between devices, if any. Null stands for the current one.
fn peers(target: CUcontext, source: CUcontext) -> Option<CUresult> {
    let alive = |context| {
        client::get().is_ok_and(|client| match context {
            0 => client.contexts.current().is_ok(),
            _ => client.contexts.get(context).is_some(),
        })
    };
    (!alive(target) || !alive(source)).then_some(CUDA_ERROR_INVALID_CONTEXT)
}

pub(crate) unsafe fn cuMemcpyPeer(
    target: CUdeviceptr,
    target_context: CUcontext,
    source: CUdeviceptr,
    source_context: CUcontext,
    bytes: usize,
) -> CUresult {
    if let Some(error) = peers(target_context, source_context) {
        return error;
    }
    // After all that was asked for in either context, and before all that will be.
    // SAFETY: no pointers.
    code(unsafe {
        check(super::context::cuCtxSynchronize_v2(target_context))
            .and_then(|()| check(super::context::cuCtxSynchronize_v2(source_context)))
            .and_then(|()| check(device_to_device(target, source, bytes, 0, Wait::Yes)))
            .and_then(|()| check(super::stream::cuStreamSynchronize(0)))
    })
}

pub(crate) unsafe fn cuMemcpyPeerAsync(
    target: CUdeviceptr,
    target_context: CUcontext,
    source: CUdeviceptr,
    source_context: CUcontext,
    bytes: usize,
    on: CUstream,
) -> CUresult {
    if let Err(error) = hook::not_capturable(on) {
        return error;
    }
    peers(target_context, source_context).unwrap_or_else(|| device_to_device(target, source, bytes, on, Wait::No))
}

//! Pinned host memory: a memfd of its own for each allocation, mapped at the same address in the worker and registered
//! there. CRIU saves it with the process.

use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rekindle_cuda_abi::types::*;
use rekindle_wire::attach::Pinned;
use rekindle_wire::command::{PINNED_MAP, PINNED_UNMAP};
use rekindle_wire::layout::PINNED_NAME;

use super::{check, code, put};
use crate::attach::{map_shared, sealed_memfd};
use crate::client::{self, Call, Client};
use crate::state::memory::Allocation;

/// Numbers memfds.
static SERIAL: AtomicU64 = AtomicU64::new(1);

const PAGE: u64 = 4096;
/// `CU_MEMHOSTALLOC_PORTABLE | DEVICEMAP | WRITECOMBINED`.
const FLAGS: u32 = 7;

pub(crate) unsafe fn cuMemHostAlloc(out: *mut *mut c_void, bytes: usize, flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        if out.is_null() || bytes == 0 || flags & !FLAGS != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let (context, _) = client.contexts.current()?;
        let size = (bytes as u64).checked_next_multiple_of(PAGE).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let serial = SERIAL.fetch_add(1, Relaxed);
        let name = CString::new(format!("{PINNED_NAME}{serial}")).map_err(|_| CUDA_ERROR_UNKNOWN)?;
        let file = sealed_memfd(&name, size as usize).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        let base = client.memory.pinned_place(size).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        // Where this fails something else is there: neither unmapped nor given out again.
        map_shared(&file, base as *mut c_void, size as usize, libc::MAP_FIXED_NOREPLACE)
            .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        // The call comes first: if it cannot be made, nothing is announced that nobody takes.
        let result = Call::in_context(PINNED_MAP).and_then(|mut call| {
            client.announce_pinned(Pinned { address: base, size, serial }, &file)?;
            call.word(base);
            call.word(size);
            call.word(u64::from(flags));
            call.word(serial);
            check(call.wait().0)
        });
        if let Err(error) = result {
            unmap(client, base, size);
            return Err(error);
        }
        client.memory.insert(Allocation::Pinned { base, size: bytes as u64, flags, context });
        // SAFETY: not null, so writable by cuda.h's contract.
        unsafe { put(out, base as *mut c_void) }
    }))
}

pub(crate) unsafe fn cuMemAllocHost_v2(out: *mut *mut c_void, bytes: usize) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuMemHostAlloc(out, bytes, 0) }
}

/// Unmaps pinned memory that the worker no longer knows, and gives its place back.
pub(super) fn unmap(client: &Client, base: u64, bytes: u64) {
    let size = bytes.next_multiple_of(PAGE);
    // SAFETY: the range was taken from the pinned window for this allocation alone.
    unsafe { libc::munmap(base as *mut c_void, size as usize) };
    client.memory.pinned_free(base, size);
}

pub(crate) unsafe fn cuMemFreeHost(pointer: *mut c_void) -> CUresult {
    code(client::get().and_then(|client| {
        let base = pointer as u64;
        let bytes = match client.memory.at(base) {
            Some(Allocation::Pinned { base: b, size, .. }) if b == base => size,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        let mut call = Call::new(PINNED_UNMAP)?;
        call.word(base);
        check(call.wait().0)?;
        client.memory.remove(base);
        unmap(client, base, bytes);
        Ok(())
    }))
}

pub(crate) unsafe fn cuMemHostGetDevicePointer_v2(out: *mut CUdeviceptr, host: *mut c_void, flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        match client.memory.at(host as u64) {
            // SAFETY: the caller's promise by cuda.h.
            Some(Allocation::Pinned { .. }) if flags == 0 => unsafe { put(out, host as u64) },
            Some(Allocation::Registered { .. }) => Err(CUDA_ERROR_NOT_SUPPORTED),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }))
}

pub(crate) unsafe fn cuMemHostGetFlags(out: *mut u32, host: *mut c_void) -> CUresult {
    code(client::get().and_then(|client| match client.memory.at(host as u64) {
        // SAFETY: the caller's promise by cuda.h. All pinned memory is mapped for the device.
        Some(Allocation::Pinned { flags, .. }) => unsafe { put(out, flags | 2) },
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }))
}

/// Registered memory stays where it is, and copies of it go through staging; the device does not reach it
/// (`cuMemHostGetDevicePointer` is refused).
pub(crate) unsafe fn cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        if pointer.is_null() || bytes == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let (context, _) = client.contexts.current()?;
        let (base, size) = (pointer as u64, bytes as u64);
        if client.memory.at(base).or_else(|| client.memory.at(base + size - 1)).is_some() {
            return Err(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        client.memory.insert(Allocation::Registered { base, size, flags, context });
        Ok(())
    }))
}

pub(crate) unsafe fn cuMemHostUnregister(pointer: *mut c_void) -> CUresult {
    code(client::get().and_then(|client| match client.memory.at(pointer as u64) {
        Some(Allocation::Registered { base, .. }) if base == pointer as u64 => {
            client.memory.remove(base);
            Ok(())
        }
        _ => Err(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
    }))
}

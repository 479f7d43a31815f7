//! Pinned host memory: a memfd of its own for each allocation, mapped at the same address in the worker and registered
//! there. CRIU saves it with the process.

use std::ffi::{CString, c_void};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rekindle_cuda_abi::types::*;
use rekindle_wire::attach::Pinned;
use rekindle_wire::command::{PINNED_MAP, PINNED_UNMAP, PinnedMap, PinnedUnmap};
use rekindle_wire::layout::PINNED_NAME;

use super::{check, code, put};
use crate::call::Call;
use crate::process::memfd::{map_shared, sealed_memfd};
use crate::state::client::{self, Client};
use crate::state::memory::Allocation;

/// Numbers memfds.
static SERIAL: AtomicU64 = AtomicU64::new(1);

const PAGE: u64 = 4096;
/// `CU_MEMHOSTALLOC_PORTABLE | DEVICEMAP | WRITECOMBINED`.
const FLAGS: u32 = 7;

/// A memfd, mapped here and in the worker at one place of the pinned window.
pub(super) struct Pages {
    pub(super) base: u64,
    /// A multiple of the page size.
    pub(super) size: u64,
    pub(super) serial: u64,
    pub(super) file: OwnedFd,
}

impl Pages {
    /// Makes it in the current context.
    pub(super) fn allocate(client: &'static Client, bytes: u64, flags: u32) -> Result<Self, CUresult> {
        let size = bytes.checked_next_multiple_of(PAGE).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let serial = SERIAL.fetch_add(1, Relaxed);
        let name = CString::new(format!("{PINNED_NAME}{serial}")).map_err(|_| CUDA_ERROR_UNKNOWN)?;
        let file = sealed_memfd(&name, size as usize).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        let base = client.memory.pinned_place(size).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        // Where this fails something else is there: neither unmapped nor given out again.
        map_shared(&file, base as *mut c_void, size as usize, libc::MAP_FIXED_NOREPLACE)
            .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        // The call comes first: if it cannot be made, nothing is announced that nobody takes.
        let result = Call::in_context(PINNED_MAP).and_then(|mut call| {
            client.connection.announce_pinned(Pinned { address: base, size, serial }, &file)?;
            call.put(&PinnedMap { address: base, size, flags, serial });
            check(call.wait().0)
        });
        if let Err(error) = result {
            unmap(client, base, size);
            return Err(error);
        }
        Ok(Self { base, size, serial, file })
    }

    /// Frees it again.
    pub(super) fn free(self, client: &Client) -> Result<(), CUresult> {
        let mut call = Call::new(PINNED_UNMAP)?;
        call.put(&PinnedUnmap { address: self.base });
        check(call.wait().0)?;
        unmap(client, self.base, self.size);
        Ok(())
    }
}

pub(crate) unsafe fn cuMemHostAlloc(out: *mut *mut c_void, bytes: usize, flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        if out.is_null() || flags & !FLAGS != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let (context, _) = client.contexts.current()?;
        if bytes == 0 {
            // SAFETY: not null, so writable by cuda.h's contract.
            return unsafe { put(out, std::ptr::null_mut()) };
        }
        let base = Pages::allocate(client, bytes as u64, flags)?.base;
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
        if base == 0 {
            return Ok(());
        }
        let bytes = match client.memory.at(base) {
            Some(Allocation::Pinned { base: b, size, .. }) if b == base => size,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        let mut call = Call::new(PINNED_UNMAP)?;
        call.put(&PinnedUnmap { address: base });
        check(call.wait().0)?;
        client.memory.remove(base);
        unmap(client, base, bytes);
        Ok(())
    }))
}

pub(crate) unsafe fn cuMemHostGetFlags(out: *mut u32, host: *mut c_void) -> CUresult {
    code(client::get().and_then(|client| match client.memory.at(host as u64) {
        // SAFETY: the caller's promise by cuda.h. All pinned memory is mapped for the device.
        Some(Allocation::Pinned { flags, .. }) => unsafe { put(out, flags | 2) },
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }))
}

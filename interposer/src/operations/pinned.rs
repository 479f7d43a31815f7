//! Pinned host memory: a memfd of its own for each allocation, mapped at the same address in the worker and registered
//! there. CRIU saves it with the process.

use std::ffi::{CString, c_void};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rekindle_cuda_abi::types::*;
use rekindle_wire::attach::Pinned;
use rekindle_wire::command::{PINNED_MAP, PINNED_UNMAP, PinnedMap, PinnedUnmap};
use rekindle_wire::layout::PINNED_NAME;

use crate::call::{Call, perform};
use crate::process::memfd::{map_shared, sealed_memfd};
use crate::state::client::Client;
use crate::state::memory::Allocation;

/// The next memfd's number.
static SERIAL: AtomicU64 = AtomicU64::new(1);

const PAGE: u64 = 4096;

/// A memfd, mapped here and in the worker at one place of the pinned window.
pub(crate) struct Pages {
    pub(crate) base: u64,
    /// A multiple of the page size.
    pub(crate) size: u64,
    pub(crate) serial: u64,
    pub(crate) file: OwnedFd,
}

impl Pages {
    /// Creates the memfd and maps it in the current context.
    pub(crate) fn allocate(client: &'static Client, bytes: u64, flags: u32) -> Result<Self, CUresult> {
        let size = bytes.checked_next_multiple_of(PAGE).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let serial = SERIAL.fetch_add(1, Relaxed);
        let name = CString::new(format!("{PINNED_NAME}{serial}")).map_err(|_| CUDA_ERROR_UNKNOWN)?;
        let file = sealed_memfd(&name, size as usize).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        let base = client.memory.pinned_place(size).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        // If this fails, another mapping is there: the place must neither be unmapped nor reused.
        map_shared(&file, base as *mut c_void, size as usize, libc::MAP_FIXED_NOREPLACE)
            .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        // The call begins first: if that fails, no memfd is announced that the worker would never take.
        let result = Call::in_context(PINNED_MAP).and_then(|mut call| {
            client.connection.announce_pinned(Pinned { address: base, size, serial, file_offset: None }, &file)?;
            call.put(&PinnedMap { address: base, size, flags, serial });
            check(call.wait().0)
        });
        if let Err(error) = result {
            unmap(client, base, size);
            return Err(error);
        }
        Ok(Self { base, size, serial, file })
    }

    /// Unmaps it in the worker and here.
    pub(crate) fn free(self, client: &Client) -> Result<(), CUresult> {
        perform(PINNED_UNMAP, &PinnedUnmap { address: self.base })?;
        unmap(client, self.base, self.size);
        Ok(())
    }
}

/// Allocates pinned memory in the current context; 0 stands for no bytes.
pub(crate) fn allocate(client: &'static Client, bytes: u64, flags: u32) -> Result<u64, CUresult> {
    let (context, _) = client.contexts.current()?;
    if bytes == 0 {
        return Ok(0);
    }
    let base = Pages::allocate(client, bytes, flags)?.base;
    client.memory.insert(Allocation::Pinned { base, size: bytes, flags, context });
    Ok(base)
}

/// Frees pinned memory; 0 stands for no bytes.
pub(crate) fn free(client: &Client, base: u64) -> Result<(), CUresult> {
    if base == 0 {
        return Ok(());
    }
    let bytes = match client.memory.at(base) {
        Some(Allocation::Pinned { base: b, size, .. }) if b == base => size,
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    perform(PINNED_UNMAP, &PinnedUnmap { address: base })?;
    client.memory.remove(base);
    unmap(client, base, bytes);
    Ok(())
}

/// Unmaps pinned memory that the worker no longer maps, and frees its place.
pub(crate) fn unmap(client: &Client, base: u64, bytes: u64) {
    let size = bytes.next_multiple_of(PAGE);
    // SAFETY: the range was taken from the pinned window for this allocation alone.
    unsafe { libc::munmap(base as *mut c_void, size as usize) };
    client.memory.pinned_free(base, size);
}

//! Managed memory that moves: device memory, with pages of a memfd at the same address in this process. A page that the device
//! has is missing here; a thread that touches it sleeps until the worker has brought it (a userfaultfd). The worker takes pages away
//! before commands that may use them: see `ctx-worker/src/resources/managed.rs`.

use std::ffi::{CString, c_void};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rekindle_cuda_abi::managed::ATTACH_GLOBAL;
use rekindle_cuda_abi::types::*;
use rekindle_wire::attach::Pinned;
use rekindle_wire::command::{MANAGED_MAP, MANAGED_UNMAP, MEM_FREE, ManagedMap, ManagedUnmap, MemFree};
use rekindle_wire::layout::MANAGED_NAME;
use rekindle_wire::window;

use super::device_memory;
use crate::call::{Call, perform};
use crate::process::log;
use crate::process::memfd::{map_shared, sealed_memfd};
use crate::state::client::Client;

/// The next memfd's number.
static SERIAL: AtomicU64 = AtomicU64::new(1);

/// Allocations up to this size stay in host memory: programs use such for flags and counters, which both sides watch.
const SMALLEST: u64 = 1 << 20;
/// The worker keeps a file open for each allocation that moves, and may have so many.
const MOST: usize = 4096;
const PAGE: u64 = 4096;

/// Whether the managed memory at this address moves: it is device memory, or the driver has placed it as a variable. What does not
/// move is pinned memory.
pub(crate) fn moves(base: u64) -> bool {
    !window::pinned().contains(&base)
}

/// Allocates managed memory that moves, of zeros, in a context and on its device. Returns address and size, or `None` where it
/// has to stay in host memory.
pub(crate) fn allocate(
    client: &'static Client,
    (context, device): (CUcontext, usize),
    bytes: u64,
    flags: u32,
) -> Result<Option<(u64, u64)>, CUresult> {
    // Memory that begins as the host's is for programs whose CPU and GPU work at once, each with its own.
    if bytes <= SMALLEST || flags != ATTACH_GLOBAL || client.managed.areas_there() >= MOST {
        return Ok(None);
    }
    if client.managed.userfault().is_none() {
        return Ok(None);
    }
    let size = bytes.checked_next_multiple_of(PAGE).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    // A GPU that has no room leaves the host's memory.
    let base = match device_memory::allocate(client, (context, device), size, Call::in_context) {
        Ok(base) => base,
        Err(CUDA_ERROR_OUT_OF_MEMORY) => return Ok(None),
        Err(error) => return Err(error),
    };
    let mapped = map(client, base, size);
    client.memory.remove(base);
    match mapped {
        Ok(()) => Ok(Some((base, size))),
        Err(error) => {
            unmap(base, size);
            perform(MEM_FREE, &MemFree { address: base })?;
            // Another device cannot reach it, or pages cannot be watched.
            if error == CUDA_ERROR_NOT_SUPPORTED { Ok(None) } else { Err(error) }
        }
    }
}

/// Maps pages over the place that is reserved for the device memory, and lets the worker have them.
fn map(client: &'static Client, base: u64, size: u64) -> Result<(), CUresult> {
    let no_memory = |_| CUDA_ERROR_OUT_OF_MEMORY;
    let userfault = client.managed.userfault().ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
    let serial = SERIAL.fetch_add(1, Relaxed);
    let name = CString::new(format!("{MANAGED_NAME}{serial}")).map_err(|_| CUDA_ERROR_UNKNOWN)?;
    let file = sealed_memfd(&name, size as usize).map_err(no_memory)?;
    map_shared(&file, base as *mut c_void, size as usize, libc::MAP_FIXED).map_err(no_memory)?;
    // A forked child would find zeros there, since its faults are not the worker's. Without the driver's own mapping it has nothing
    // either.
    // SAFETY: the range was mapped just now.
    if unsafe { libc::madvise(base as *mut c_void, size as usize, libc::MADV_DONTFORK) } != 0 {
        return Err(CUDA_ERROR_UNKNOWN);
    }
    let mut call = Call::in_context(MANAGED_MAP)?;
    let announced = Pinned { address: base, size, serial, file_offset: None };
    client.connection.announce(announced, &[file.as_raw_fd(), userfault.as_raw_fd()])?;
    call.put(&ManagedMap { address: base, size, serial });
    check(call.wait().0)
}

/// Frees managed memory that nothing uses any more.
pub(crate) fn free(base: u64, size: u64) -> Result<(), CUresult> {
    perform(MANAGED_UNMAP, &ManagedUnmap { address: base })?;
    unmap(base, size);
    perform(MEM_FREE, &MemFree { address: base })
}

/// Gives the pages back. Their place is reserved again, as that of other device memory.
pub(crate) fn unmap(base: u64, size: u64) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the range is that of one allocation, which is the program's no more.
    let got = unsafe { libc::mmap(base as *mut c_void, size as usize, libc::PROT_NONE, flags, -1, 0) };
    if got == libc::MAP_FAILED {
        log::note("pages of managed memory that was freed stay mapped: the process has too many mappings");
    }
}

//! Memory of the application that it registers. Its pages are moved into a memfd that the worker maps too (see
//! [`crate::process::moves`]), so that copies and kernels use it in place. The device has another address for it, in the
//! pinned window (attribute 91 says that host pointers cannot be used for it). Pages that are shared with other processes stay where
//! they are, and the worker maps their file too (see [`crate::operations::shared_memory`]). Pages for which neither can be done stay
//! as well: copies of them go through the bounce buffer, and they have no device pointer.

use std::ffi::c_void;
use std::sync::Mutex;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{PINNED_UNMAP, PinnedUnmap};

use super::{code, put};
use crate::call::{perform, standing_error};
use crate::operations::pinned::{self, Pages};
use crate::operations::shared_memory;
use crate::process::log;
use crate::process::moves::{self, Refusal};
use crate::state::client::{self, Client};
use crate::state::memory::Allocation;

/// `CU_MEMHOSTREGISTER_*`: memory of a device on the bus, which only the driver can map, and all flags.
const IO_MEMORY: u32 = 4;
const FLAGS: u32 = 0xf;

const PAGE: u64 = 4096;

/// In place of a memfd's serial number: the memory is shared, and stays where it is.
const SHARED: u64 = 0;

/// One registration or its end at a time.
static REGISTERING: Mutex<()> = Mutex::new(());

/// The form before CUDA 6.5.
pub(crate) unsafe fn cuMemHostRegister(pointer: *mut c_void, bytes: usize, flags: u32) -> CUresult {
    // SAFETY: the same contract.
    unsafe { cuMemHostRegister_v2(pointer, bytes, flags) }
}

pub(crate) unsafe fn cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        standing_error(client)?;
        if pointer.is_null() || bytes == 0 || flags & !FLAGS != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let (context, _) = client.contexts.current()?;
        let (base, size) = (pointer as u64, bytes as u64);
        let end = base.checked_add(size).and_then(|end| end.checked_next_multiple_of(PAGE));
        let pages = base & !(PAGE - 1)..end.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if flags & IO_MEMORY != 0 {
            log::refused("cuMemHostRegister of I/O memory");
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let _one = REGISTERING.lock().map_err(|_| CUDA_ERROR_UNKNOWN)?;
        if matches!(client.memory.at(base), Some(Allocation::Managed { .. })) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if client.memory.meets(base, size) {
            return Err(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        let registered = |alias, serial| Allocation::Registered { base, size, flags, context, alias, serial };
        // Buffers that share a page with registered ones stay: a page can be in one memfd only.
        if moves::meets(&pages) {
            client.memory.insert(registered(0, 0));
            return Ok(());
        }
        let insert_alias = |alias: u64, serial| {
            let alias = alias + (base - pages.start);
            client.memory.insert(registered(alias, serial));
            client.memory.insert(Allocation::Mapped { base: alias, size, host: base, context });
        };
        if moves::are_shared(&pages) {
            match shared_memory::register(client, &pages, flags) {
                Ok(alias) => insert_alias(alias, SHARED),
                Err(_) => {
                    log::note(&format!(
                        "registered memory at {base:#x} has no device pointer: the worker does not map the file that the program shares"
                    ));
                    client.memory.insert(registered(0, 0));
                }
            }
            return Ok(());
        }
        let moved = Pages::allocate(client, pages.end - pages.start, flags)?;
        let standstill = client.connection.standstill();
        let result = moves::move_in(pages.clone(), moved.base, &moved.file, moved.serial);
        drop(standstill);
        match result {
            Ok(()) => {
                // SAFETY: our own mapping, which a child needs not.
                unsafe { libc::madvise(moved.base as *mut _, moved.size as usize, libc::MADV_DONTFORK) };
                insert_alias(moved.base, moved.serial);
                Ok(())
            }
            Err(refusal) => {
                moved.free(client)?;
                match refusal {
                    Refusal::Unmapped => return Err(CUDA_ERROR_INVALID_VALUE),
                    Refusal::Shared | Refusal::Kind | Refusal::System(_) => {
                        log::note(&format!(
                            "registered memory at {base:#x} is not moved, so it has no device pointer: {refusal}"
                        ));
                    }
                }
                client.memory.insert(registered(0, 0));
                Ok(())
            }
        }
    }))
}

pub(crate) unsafe fn cuMemHostUnregister(pointer: *mut c_void) -> CUresult {
    code(client::get().and_then(|client| {
        let _one = REGISTERING.lock().map_err(|_| CUDA_ERROR_UNKNOWN)?;
        let known = client.memory.at(pointer as u64);
        let Some(Allocation::Registered { base, alias, .. }) = known.filter(|a| a.base() == pointer as u64) else {
            standing_error(client)?;
            return Err(match known {
                // The middle of what is registered.
                Some(Allocation::Registered { .. }) => CUDA_ERROR_INVALID_VALUE,
                _ => CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
            });
        };
        if alias != 0 {
            perform(PINNED_UNMAP, &PinnedUnmap { address: alias & !(PAGE - 1) })?;
            client.memory.remove(alias);
        }
        if let Some(gone) = client.memory.remove(base) {
            take_back(client, &gone);
        }
        Ok(())
    }))
}

/// Gives the application its pages back, which the worker no longer has.
pub(super) fn take_back(client: &Client, registered: &Allocation) {
    let Allocation::Registered { base, size, alias, serial, .. } = *registered else { return };
    if alias == 0 {
        return;
    }
    let pages = base & !(PAGE - 1)..(base + size).next_multiple_of(PAGE);
    let mapped = alias & !(PAGE - 1);
    if serial == SHARED {
        return shared_memory::unmap(client, mapped, pages.end - pages.start);
    }
    let standstill = client.connection.standstill();
    let result = moves::move_out(&pages, mapped, serial);
    drop(standstill);
    match result {
        Ok(()) => pinned::unmap(client, mapped, pages.end - pages.start),
        // They stay in the memfd, where they are as good until a fork; its other mapping must stay too.
        Err(error) => log::note(&format!("memory at {base:#x} stays shared after it was unregistered: {error}")),
    }
}

pub(crate) unsafe fn cuMemHostGetDevicePointer_v2(out: *mut CUdeviceptr, host: *mut c_void, flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        client.contexts.current()?;
        let address = host as u64;
        match client.memory.at(address) {
            _ if flags != 0 => Err(CUDA_ERROR_INVALID_VALUE),
            // SAFETY: the caller's promise by cuda.h.
            Some(Allocation::Pinned { .. }) => unsafe { put(out, address) },
            Some(Allocation::Registered { base, alias, .. }) if alias != 0 => {
                // SAFETY: the caller's promise by cuda.h.
                unsafe { put(out, alias + (address - base)) }
            }
            Some(Allocation::Registered { .. }) => {
                log::refused("cuMemHostGetDevicePointer of registered memory that could not be moved");
                Err(CUDA_ERROR_NOT_SUPPORTED)
            }
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }))
}

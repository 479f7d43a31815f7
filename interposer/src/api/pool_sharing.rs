//! Pools that processes share. A pool's handle is a file with its name. A pointer's is the name of the segment of the pool
//! that has the memory, and the place in it; a process that imports pointers maps each segment once, and keeps it as long as
//! the pool. So a free is a note here, whatever its stream has still to do.

use std::ffi::c_void;
use std::os::fd::IntoRawFd;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{
    ADDRESS_FREE, AddressRange, Kind, OfPiece, PIECE_ACCESS, PIECE_RELEASE, PIECE_UNMAP, POOL_EXPORT,
    POOL_MEMORY_EXPORT, Parameters, PieceAccess, PoolExport, PoolMemoryExport,
};
use rekindle_wire::ipc::{self, HANDLE_BYTES, Named, PoolMemory};

use super::ipc::{KNOWN_HANDLE_TYPES, file_of, map, name, take, token_in};
use super::{check, code, put};
use crate::call::{Call, perform, remote};
use crate::process::log;
use crate::state::client::{self, Client};
use crate::state::ipc::Placed;
use crate::state::memory::Allocation;
use crate::state::pools::Imported;

pub(crate) unsafe fn cuMemPoolExportToShareableHandle(
    handle_out: *mut c_void,
    pool: u64,
    handleType: u32,
    flags: u64,
) -> CUresult {
    code(client::get().and_then(|client| {
        if handle_out.is_null() || flags != 0 || client.pools.lock().handle_types(pool) & handleType == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let token = name(POOL_EXPORT, &PoolExport { pool })?;
        let file = file_of(&ipc::handle(Named::Pool, &token)).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
        client.pools.lock().exported(pool);
        // SAFETY: not null, and a place for a descriptor by cuda.h's contract.
        unsafe { put(handle_out.cast::<i32>(), file.into_raw_fd()) }
    }))
}

/// These calls have one error for all that names nothing.
fn wrong_value(error: CUresult) -> CUresult {
    if error == CUDA_ERROR_INVALID_HANDLE { CUDA_ERROR_INVALID_VALUE } else { error }
}

pub(crate) unsafe fn cuMemPoolImportFromShareableHandle(
    pool_out: *mut c_void,
    handle: *mut c_void,
    handleType: u32,
    flags: u64,
) -> CUresult {
    code(client::get().and_then(|client| {
        if pool_out.is_null() || flags != 0 || !KNOWN_HANDLE_TYPES.contains(&handleType) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
            log::refused("cuMemPoolImportFromShareableHandle of other handles than files");
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        give_reservations_back(client);
        let token = token_in(handle as usize as i32, Named::Pool).ok_or(CUDA_ERROR_UNKNOWN)?;
        // The name is good, and the process may share with the pool's.
        let device = take(client, &token, true).map_err(wrong_value)?.device;
        let pool = client.fresh(Kind::MemPool);
        client.pools.add_imported(pool, Imported::new(token, device));
        // SAFETY: not null, writable by cuda.h's contract.
        unsafe { put(pool_out.cast(), pool) }
    }))
}

pub(crate) unsafe fn cuMemPoolExportPointer(shareData_out: *mut c_void, ptr: CUdeviceptr) -> CUresult {
    code(client::get().and_then(|client| {
        let pool = match client.memory.at(ptr) {
            Some(Allocation::Pooled { base, pool, .. }) if base == ptr => pool,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        // The driver (580) refuses memory of a pool that has no handle yet.
        if shareData_out.is_null() || !client.pools.lock().is_exported(pool) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut call = Call::new(POOL_MEMORY_EXPORT)?;
        call.put(&PoolMemoryExport { address: ptr });
        let (result, mut reply) = call.wait();
        check(result)?;
        let mut word = || reply.word().ok_or(CUDA_ERROR_UNKNOWN);
        let (segment, pool) = (ipc::of_words([word()?, word()?]), ipc::of_words([word()?, word()?]));
        let memory = PoolMemory { segment, pool, offset: word()?, size: word()? };
        // SAFETY: not null, and as large by cuda.h's contract.
        unsafe { put(shareData_out.cast(), memory.handle()) }
    }))
}

pub(crate) unsafe fn cuMemPoolImportPointer(ptr_out: *mut CUdeviceptr, pool: u64, shareData: *mut c_void) -> CUresult {
    code(client::get().and_then(|client| {
        if ptr_out.is_null() || shareData.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and as large by cuda.h's contract.
        let bytes = unsafe { shareData.cast::<[u8; HANDLE_BYTES]>().read_unaligned() };
        let memory = PoolMemory::of(&bytes).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        give_reservations_back(client);
        let mut state = client.pools.lock();
        let imported = state.imported(pool).filter(|it| it.token == memory.pool).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if imported.segment(&memory.segment).is_none() {
            let pieces = take(client, &memory.segment, true).map_err(wrong_value)?;
            let devices: Vec<usize> = imported.access.iter().copied().collect();
            let placed = map(client, &devices, &pieces).inspect_err(|_| pieces.release())?;
            imported.add_segment(memory.segment, placed);
        }
        let placed = imported.segment(&memory.segment).ok_or(CUDA_ERROR_UNKNOWN)?;
        let end = memory.offset.checked_add(memory.size).filter(|end| *end <= placed.bytes);
        let base = placed.reserved + memory.offset;
        if end.is_none() || memory.size == 0 || !imported.open(base, memory.size) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let device = imported.device;
        client.memory.insert(Allocation::Pooled { base, size: memory.size, device, pool });
        // SAFETY: not null, writable by cuda.h's contract.
        unsafe { put(ptr_out, base) }
    }))
}

/// Does something with a pool of another process; `None` if the handle names no such pool.
pub(super) fn with_imported<T>(
    client: &Client,
    pool: u64,
    body: impl FnOnce(&mut Imported) -> Result<T, CUresult>,
) -> Option<Result<T, CUresult>> {
    client.pools.lock_imported()?.imported(pool).map(body)
}

/// The error of calls that only the process of the pool may make.
pub(super) fn not_imported(client: &Client, pool: u64) -> Result<(), CUresult> {
    with_imported(client, pool, |_| Err(CUDA_ERROR_INVALID_VALUE)).unwrap_or(Ok(()))
}

/// Lets another device use the memory of a pool of another process, or no longer.
pub(super) fn set_access(client: &Client, pool: &mut Imported, device: usize, access: u32) -> Result<(), CUresult> {
    let open = access == CU_MEM_ACCESS_READWRITE;
    // As for pools of this process.
    if !open && access != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if device == pool.device {
        return if open { Ok(()) } else { Err(CUDA_ERROR_INVALID_DEVICE) };
    }
    let ordinal = |device| client.devices.ordinal(device);
    let mut can = 0;
    // SAFETY: the out parameter is a local.
    check(unsafe { remote::cuDeviceCanAccessPeer(&raw mut can, ordinal(device), ordinal(pool.device)) })?;
    if open && can == 0 {
        return Err(CUDA_ERROR_INVALID_DEVICE);
    }
    let access = vec![(device as u64, access)];
    for placed in pool.segments() {
        perform(PIECE_ACCESS, &PieceAccess { address: placed.reserved, size: placed.bytes, access: access.clone() })?;
    }
    if open {
        pool.access.insert(device)
    } else {
        pool.access.remove(&device)
    };
    Ok(())
}

/// Destroys a pool of another process; `None` if the handle names no such pool.
pub(super) fn destroy(client: &Client, pool: u64) -> Option<Result<(), CUresult>> {
    let gone = client.pools.lock_imported()?.destroy_imported(pool)?;
    Some(gone.and_then(|gone| leave(client, gone)))
}

/// Frees memory of a pool of another process; `None` for other memory.
pub(super) fn free(client: &Client, address: u64) -> Option<Result<(), CUresult>> {
    let Some(Allocation::Pooled { base, pool, .. }) = client.memory.at(address) else { return None };
    let mut state = client.pools.lock_imported().filter(|_| base == address)?;
    if state.free_imported(pool, address)? {
        client.memory.remove(address);
    }
    Some(Ok(()))
}

/// Forgets the pools of other processes on a device.
pub(super) fn forget_device(client: &Client, device: usize) {
    let gone = client.pools.lock_imported().map(|mut state| state.forget_device(device));
    // After a failure, the process's end frees the memory.
    let _ = leave(client, gone.unwrap_or_default());
}

/// Has segments unmapped when nothing uses them any more, and does not wait for that.
fn leave(client: &Client, gone: Vec<Placed>) -> Result<(), CUresult> {
    for placed in &gone {
        send(PIECE_UNMAP, &AddressRange { address: placed.reserved, size: placed.bytes })?;
        for piece in &placed.pieces {
            send(PIECE_RELEASE, &OfPiece { piece: *piece })?;
        }
    }
    client.pools.lock().leaving.extend(gone);
    Ok(())
}

fn send(number: u16, parameters: &impl Parameters) -> Result<(), CUresult> {
    let mut call = Call::new(number)?;
    call.put(parameters);
    check(call.send())
}

/// Gives addresses back at which nothing is mapped any more.
fn give_reservations_back(client: &Client) {
    client.pools.lock().leaving.retain(|placed| {
        let range = AddressRange { address: placed.reserved, size: placed.bytes };
        let free = perform(ADDRESS_FREE, &range).is_ok();
        if free {
            client.vmm.give(placed.reserved, placed.bytes);
        }
        !free
    });
}

//! Virtual memory management: addresses that the program reserves, memory that it makes and maps there. The process
//! keeps the addresses free and knows what is where; the worker does the same with the driver.

use std::ffi::c_void;

use rekindle_cuda_abi::raw::read;
use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{
    ADDRESS_FREE, ADDRESS_RESERVE, AddressRange, Kind, OfPiece, PIECE_ACCESS, PIECE_CREATE, PIECE_GRANULARITY,
    PIECE_MAP, PIECE_RELEASE, PIECE_RETAIN, PIECE_UNMAP, PieceAccess, PieceCreate, PieceFlags, PieceGranularity,
    PieceMap,
};

use super::{check, code, put};
use crate::call::{Call, perform};
use crate::process::log;
use crate::state::client::{self, Client};
use crate::state::memory::Allocation;
use crate::state::vmm::Tell;

/// `CU_MEM_ALLOCATION_TYPE_MANAGED`.
const MANAGED: u32 = 2;

/// The worker's number of a location's device. Host memory is refused.
fn device_of(client: &Client, kind: u32, id: CUdevice, what: &'static str) -> Result<usize, CUresult> {
    match kind {
        CU_MEM_LOCATION_TYPE_DEVICE => client.devices.number(id),
        kind if kind != 0 && kind <= CU_MEM_LOCATION_TYPE_LAST => {
            log::refused(what);
            Err(CUDA_ERROR_NOT_SUPPORTED)
        }
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

/// The properties of a piece that the program requests, and its device.
///
/// # Safety
/// `properties` is null or as cuda.h has it.
unsafe fn requested(
    client: &Client,
    properties: *const CUmemAllocationProp,
) -> Result<(CUmemAllocationProp, usize), CUresult> {
    if properties.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so readable by the caller's promise.
    let wanted = unsafe { properties.read_unaligned() };
    if wanted.kind == MANAGED {
        log::refused("cuMemCreate of managed memory");
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    if wanted.kind != CU_MEM_ALLOCATION_TYPE_PINNED {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let device = device_of(client, wanted.location_type, wanted.location_id, "cuMemCreate of host memory")?;
    Ok((wanted, device))
}

fn flags_of(wanted: &CUmemAllocationProp) -> PieceFlags {
    PieceFlags { compression: wanted.compression, rdma: wanted.rdma, usage: wanted.usage }
}

pub(crate) unsafe fn cuMemGetAllocationGranularity(
    granularity: *mut usize,
    prop: *const CUmemAllocationProp,
    option: u32,
) -> CUresult {
    code(client::get().and_then(|client| {
        if prop.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, so readable by cuda.h's contract.
        let wanted = unsafe { prop.read_unaligned() };
        // The driver looks neither at the device nor at the kind of memory.
        let device = match wanted.location_type {
            0 | CU_MEM_LOCATION_TYPE_DEVICE => client.devices.number(wanted.location_id).unwrap_or(0),
            // NCCL takes a failure here for success, and only then one of `cuMemCreate`.
            CU_MEM_LOCATION_TYPE_HOST..=CU_MEM_LOCATION_TYPE_LAST => 0,
            kind => device_of(client, kind, wanted.location_id, "cuMemGetAllocationGranularity of host memory")?,
        };
        let mut call = Call::new(PIECE_GRANULARITY)?;
        let (device, flags) = (device as u64, flags_of(&wanted));
        call.put(&PieceGranularity { option, device, handle_types: wanted.handle_types, flags });
        let (result, mut reply) = call.wait();
        check(result)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(granularity, reply.word().ok_or(CUDA_ERROR_UNKNOWN)? as usize) }
    }))
}

pub(crate) unsafe fn cuMemAddressReserve(
    ptr: *mut CUdeviceptr,
    size: usize,
    alignment: usize,
    addr: CUdeviceptr,
    flags: u64,
) -> CUresult {
    code(client::get().and_then(|client| {
        let size = size as u64;
        let right = flags == 0 && !ptr.is_null() && size > 0 && size.is_multiple_of(MEMORY_GRANULARITY);
        if !right || (alignment != 0 && !alignment.is_power_of_two()) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let address = client.vmm.take(size, alignment as u64, addr).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let reserved = Call::new(ADDRESS_RESERVE).and_then(|mut call| {
            call.put(&AddressRange { address, size });
            check(call.wait().0)
        });
        // After a failure the addresses stay reserved here, so that the next reservation tries others.
        reserved?;
        // SAFETY: not null, so writable by cuda.h's contract.
        unsafe { put(ptr, address) }
    }))
}

pub(crate) unsafe fn cuMemAddressFree(ptr: CUdeviceptr, size: usize) -> CUresult {
    code(client::get().and_then(|client| {
        if !client.vmm.is_reservation(ptr, size as u64) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        perform(ADDRESS_FREE, &AddressRange { address: ptr, size: size as u64 })?;
        client.vmm.give(ptr, size as u64);
        Ok(())
    }))
}

pub(crate) unsafe fn cuMemCreate(
    handle: *mut c_void,
    size: usize,
    prop: *const CUmemAllocationProp,
    flags: u64,
) -> CUresult {
    code(client::get().and_then(|client| {
        if flags != 0 || handle.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller's promise by cuda.h.
        let (wanted, device) = unsafe { requested(client, prop)? };
        let mut call = Call::new(PIECE_CREATE)?;
        let piece = client.fresh(Kind::Piece);
        let (handle_types, flags) = (wanted.handle_types, flags_of(&wanted));
        call.put(&PieceCreate { piece, size: size as u64, device: device as u64, handle_types, flags });
        check(call.wait().0)?;
        client.vmm.add(piece, device, wanted);
        // SAFETY: not null, so writable by cuda.h's contract.
        unsafe { put(handle.cast(), piece) }
    }))
}

fn about_piece(number: u16, handle: u64) -> Result<(), CUresult> {
    perform(number, &OfPiece { piece: handle })
}

pub(crate) unsafe fn cuMemRelease(handle: u64) -> CUresult {
    code(client::get().and_then(|client| match client.vmm.release(handle) {
        Some(Tell::Worker) => about_piece(PIECE_RELEASE, handle),
        Some(Tell::Nothing) => Ok(()),
        None => Err(CUDA_ERROR_INVALID_VALUE),
    }))
}

pub(crate) unsafe fn cuMemRetainAllocationHandle(handle: *mut c_void, addr: *mut c_void) -> CUresult {
    code(client::get().and_then(|client| {
        if handle.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let (piece, tell) = client.vmm.retain_at(addr as u64).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if tell == Tell::Worker {
            about_piece(PIECE_RETAIN, piece)?;
        }
        // SAFETY: not null, so writable by cuda.h's contract.
        unsafe { put(handle.cast(), piece) }
    }))
}

pub(crate) unsafe fn cuMemGetAllocationPropertiesFromHandle(prop: *mut CUmemAllocationProp, handle: u64) -> CUresult {
    code(client::get().and_then(|client| {
        let piece = client.vmm.piece(handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(prop, piece.properties) }
    }))
}

pub(crate) unsafe fn cuMemMap(ptr: CUdeviceptr, size: usize, offset: usize, handle: u64, flags: u64) -> CUresult {
    code(client::get().and_then(|client| {
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let piece = client.vmm.piece(handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        perform(PIECE_MAP, &PieceMap { address: ptr, size: size as u64, offset: offset as u64, piece: handle, flags })?;
        client.vmm.map(ptr, size as u64, handle);
        client.memory.insert(Allocation::Mapping {
            base: ptr,
            size: size as u64,
            device: piece.device,
            handle_types: piece.properties.handle_types,
        });
        Ok(())
    }))
}

pub(crate) unsafe fn cuMemUnmap(ptr: CUdeviceptr, size: usize) -> CUresult {
    code(client::get().and_then(|client| {
        perform(PIECE_UNMAP, &AddressRange { address: ptr, size: size as u64 })?;
        for base in client.vmm.unmap(ptr, size as u64) {
            client.memory.remove(base);
        }
        Ok(())
    }))
}

pub(crate) unsafe fn cuMemSetAccess(
    ptr: CUdeviceptr,
    size: usize,
    desc: *const CUmemAccessDesc,
    count: usize,
) -> CUresult {
    code(client::get().and_then(|client| {
        if desc.is_null() || count == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut wanted = Vec::new();
        for i in 0..count {
            // SAFETY: cuda.h has the array hold `count` elements.
            let access = unsafe { desc.add(i).read_unaligned() };
            let (kind, id) = (access.location_type, access.location_id);
            let device = device_of(client, kind, id, "cuMemSetAccess for the host");
            let device =
                device.map_err(|e| if e == CUDA_ERROR_INVALID_DEVICE { CUDA_ERROR_INVALID_VALUE } else { e })?;
            if !matches!(access.flags, 0 | CU_MEM_ACCESS_READ | CU_MEM_ACCESS_READWRITE) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            wanted.push((device, access.flags));
        }
        let mut call = Call::new(PIECE_ACCESS)?;
        let access = wanted.iter().map(|(device, flags)| (*device as u64, *flags)).collect();
        call.put(&PieceAccess { address: ptr, size: size as u64, access });
        check(call.wait().0)?;
        for (device, flags) in wanted {
            client.vmm.set_access(ptr, size as u64, device, flags);
        }
        Ok(())
    }))
}

pub(crate) unsafe fn cuMemGetAccess(flags: *mut u64, location: *const CUmemLocation, ptr: CUdeviceptr) -> CUresult {
    code(client::get().and_then(|client| {
        // SAFETY: the caller's promise by cuda.h.
        let location = unsafe { read(location) }?;
        let device = device_of(client, location.kind, location.id, "cuMemGetAccess of the host")?;
        let access = client.vmm.access(ptr, device).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(flags, u64::from(access)) }
    }))
}

//! Virtual memory management.

use std::ffi::c_void;
use std::os::fd::IntoRawFd;

use rekindle_cuda_abi::arguments::{Count, In, InArray, Out};
use rekindle_cuda_abi::types::{
    CU_MEM_ACCESS_READ, CU_MEM_ACCESS_READWRITE, CU_MEM_ALLOCATION_TYPE_PINNED,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_DEVICE,
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp,
    CUmemLocation, CUresult, MEMORY_GRANULARITY,
};

use crate::config::config;
use crate::device::{Device, device};
use crate::memory::{space, vmm};
use crate::status::{Result, ensure, put, status};

/// The device that a property names: memory of the host is not supported.
fn device_of(property: &CUmemAllocationProp) -> Result<&'static Device> {
    ensure(property.kind == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE)?;
    ensure(property.location_type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_NOT_SUPPORTED)?;
    ensure(property.handle_types & !CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR == 0, CUDA_ERROR_NOT_SUPPORTED)?;
    device(property.location_id)
}

pub fn cuMemGetAllocationGranularity(
    granularity: Out<usize>,
    property: In<CUmemAllocationProp>,
    _option: u32,
) -> CUresult {
    status(|| {
        property.read()?;
        granularity.put(MEMORY_GRANULARITY as usize)
    })
}

pub fn cuMemAddressReserve(
    out: Out<CUdeviceptr>,
    size: usize,
    alignment: usize,
    hint: CUdeviceptr,
    flags: u64,
) -> CUresult {
    status(|| {
        ensure(flags == 0 && !out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        out.put(vmm::reserve(size as u64, alignment as u64, hint)?)
    })
}

pub fn cuMemAddressFree(pointer: CUdeviceptr, size: usize) -> CUresult {
    status(|| vmm::unreserve(pointer, size as u64))
}

pub fn cuMemCreate(handle: Out<u64>, size: usize, property: In<CUmemAllocationProp>, flags: u64) -> CUresult {
    status(|| {
        ensure(flags == 0 && !handle.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let property = *property.read()?;
        let piece = vmm::create(device_of(&property)?, size as u64, property)?;
        handle.put(piece)
    })
}

pub fn cuMemRelease(handle: u64) -> CUresult {
    status(|| vmm::release(handle))
}

pub fn cuMemRetainAllocationHandle(handle: Out<u64>, address: *mut c_void) -> CUresult {
    status(|| {
        ensure(!handle.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        handle.put(vmm::retain_at(address as u64)?)
    })
}

pub fn cuMemGetAllocationPropertiesFromHandle(property: Out<CUmemAllocationProp>, handle: u64) -> CUresult {
    status(|| property.put(vmm::piece(handle)?.properties))
}

pub fn cuMemMap(pointer: CUdeviceptr, size: usize, offset: usize, handle: u64, flags: u64) -> CUresult {
    status(|| {
        ensure(flags == 0, CUDA_ERROR_INVALID_VALUE)?;
        vmm::map(pointer, size as u64, offset as u64, handle)
    })
}

pub fn cuMemUnmap(pointer: CUdeviceptr, size: usize) -> CUresult {
    status(|| vmm::unmap(pointer, size as u64))
}

pub fn cuMemSetAccess(
    pointer: CUdeviceptr,
    size: usize,
    descriptors: InArray<CUmemAccessDesc>,
    count: Count,
) -> CUresult {
    status(|| {
        let descriptors = descriptors.values(count)?;
        ensure(!descriptors.is_empty(), CUDA_ERROR_INVALID_VALUE)?;
        for access in descriptors {
            ensure(access.location_type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_NOT_SUPPORTED)?;
            let (read, write) = match access.flags {
                0 => (false, false),
                CU_MEM_ACCESS_READ => (true, false),
                CU_MEM_ACCESS_READWRITE => (true, true),
                _ => return Err(CUDA_ERROR_INVALID_VALUE),
            };
            let other = device(access.location_id).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
            let apart = space::find(pointer).is_some_and(|region| region.device != other.ordinal);
            ensure(config().peers || !apart || !read, CUDA_ERROR_INVALID_DEVICE)?;
            vmm::set_access(pointer, size as u64, other, read, write)?;
        }
        Ok(())
    })
}

pub fn cuMemGetAccess(flags: Out<u64>, location: In<CUmemLocation>, pointer: CUdeviceptr) -> CUresult {
    status(|| {
        let location = location.read()?;
        ensure(location.kind == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_NOT_SUPPORTED)?;
        let bit = 1 << device(location.id)?.ordinal;
        let region = space::find(pointer).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let access = match (region.readers & bit != 0, region.writers & bit != 0) {
            (true, true) => CU_MEM_ACCESS_READWRITE,
            (true, false) => CU_MEM_ACCESS_READ,
            _ => 0,
        };
        flags.put(access.into())
    })
}

pub unsafe fn cuMemExportToShareableHandle(out: *mut c_void, handle: u64, kind: u32, flags: u64) -> CUresult {
    status(|| {
        ensure(flags == 0 && !out.is_null() && kind != 0, CUDA_ERROR_INVALID_VALUE)?;
        ensure(kind == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED)?;
        let descriptor = vmm::export(handle)?;
        // SAFETY: null or room for a descriptor, by the caller's promise.
        unsafe { put(out.cast::<i32>(), descriptor.into_raw_fd()) }
    })
}

pub fn cuMemImportFromShareableHandle(handle: Out<u64>, descriptor: *mut c_void, kind: u32) -> CUresult {
    status(|| {
        ensure(!handle.is_null() && kind != 0, CUDA_ERROR_INVALID_VALUE)?;
        ensure(kind == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED)?;
        handle.put(vmm::import(descriptor as usize as i32)?)
    })
}

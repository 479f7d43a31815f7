//! Stream-ordered allocation and its pools.

use std::ffi::c_void;
use std::os::fd::IntoRawFd;
use std::sync::atomic::Ordering;

use rekindle_cuda_abi::arguments::{Count, In, InArray, Out};
use rekindle_cuda_abi::types::{
    CU_MEM_ACCESS_READWRITE, CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_SUCCESS, CUdevice, CUdeviceptr, CUmemAccessDesc, CUmemLocation, CUmemPoolProps, CUresult, CUstream,
};

use rekindle_graphs::hook;

use crate::config::config;
use crate::device::{Device, device};
use crate::memory::ipc::Handle;
use crate::memory::ipc_pool;
use crate::memory::space::{self, Kind};
use crate::status::{Result, ensure, put, status};
use crate::{current, process, stream_ordered};

pub fn cuDeviceGetDefaultMemPool(out: Out<u64>, dev: CUdevice) -> CUresult {
    status(|| out.put(device(dev)?.pools.default()))
}

pub fn cuDeviceGetMemPool(out: Out<u64>, dev: CUdevice) -> CUresult {
    status(|| out.put(named(dev)?.pools.current()))
}

/// The named device. For these calls an unknown device is a wrong value.
fn named(dev: CUdevice) -> Result<&'static Device> {
    device(dev).map_err(|_| CUDA_ERROR_INVALID_VALUE)
}

/// The device that a location and a type of allocation name.
fn located(location: In<CUmemLocation>, kind: u64) -> Result<CUdevice> {
    let location = *location.read()?;
    // An enumeration: the upper half of its register means nothing.
    ensure(kind as u32 == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_NOT_SUPPORTED)?;
    ensure(location.kind == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_NOT_SUPPORTED)?;
    Ok(location.id)
}

pub fn cuMemGetDefaultMemPool(out: Out<u64>, location: In<CUmemLocation>, kind: u64) -> CUresult {
    let id = located(location, kind);
    status(|| out.put(device(id?)?.pools.default()))
}

pub fn cuMemGetMemPool(out: Out<u64>, location: In<CUmemLocation>, kind: u64) -> CUresult {
    let id = located(location, kind);
    status(|| out.put(device(id?)?.pools.current()))
}

pub fn cuMemSetMemPool(location: In<CUmemLocation>, kind: u64, pool: u64) -> CUresult {
    let id = located(location, kind);
    status(|| device(id?)?.pools.set_current(pool))
}

pub fn cuDeviceSetMemPool(dev: CUdevice, pool: u64) -> CUresult {
    status(|| named(dev)?.pools.set_current(pool))
}

pub unsafe fn cuMemPoolCreate(out: Out<u64>, properties: *const c_void) -> CUresult {
    status(|| {
        ensure(!out.is_null() && !properties.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: not null, so properties by the caller's promise.
        let properties = unsafe { properties.cast::<CUmemPoolProps>().read_unaligned() };
        ensure(properties.kind == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE)?;
        let on_device = properties.location_type == CU_MEM_LOCATION_TYPE_DEVICE;
        ensure(on_device && properties.handle_types & !FILES == 0, CUDA_ERROR_NOT_SUPPORTED)?;
        out.put(named(properties.location_id)?.pools.create(properties.handle_types, None))
    })
}

const FILES: u32 = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

pub unsafe fn cuMemPoolExportToShareableHandle(out: *mut c_void, pool: u64, kind: u32, flags: u64) -> CUresult {
    status(|| {
        process::initialized()?;
        ensure(!out.is_null() && flags == 0 && kind == FILES, CUDA_ERROR_INVALID_VALUE)?;
        let (owner, found) = stream_ordered::find(pool)?;
        let descriptor = ipc_pool::export(owner, &found)?;
        // SAFETY: null or room for a descriptor, by the caller's promise.
        unsafe { put(out.cast::<i32>(), descriptor.into_raw_fd()) }
    })
}

pub fn cuMemPoolImportFromShareableHandle(out: Out<u64>, descriptor: *mut c_void, kind: u32, flags: u64) -> CUresult {
    status(|| {
        process::initialized()?;
        ensure(!out.is_null() && flags == 0 && matches!(kind, 1 | 2 | 4 | 8), CUDA_ERROR_INVALID_VALUE)?;
        ensure(kind == FILES, CUDA_ERROR_NOT_SUPPORTED)?;
        let (owner, source) = ipc_pool::import(descriptor as usize as i32)?;
        out.put(owner.pools.create(0, Some(source)))
    })
}

pub unsafe fn cuMemPoolExportPointer(out: *mut c_void, pointer: CUdeviceptr) -> CUresult {
    status(|| {
        process::initialized()?;
        // SAFETY: null or room for the data, by the caller's promise.
        unsafe { put(out.cast(), ipc_pool::handle(pointer)?) }
    })
}

pub unsafe fn cuMemPoolImportPointer(out: Out<CUdeviceptr>, pool: u64, data: *mut c_void) -> CUresult {
    status(|| {
        process::initialized()?;
        ensure(!out.is_null() && !data.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let (owner, found) = stream_ordered::find(pool)?;
        // SAFETY: not null, so such data by the caller's promise.
        let handle = unsafe { data.cast::<Handle>().read_unaligned() };
        out.put(ipc_pool::open(owner, found, &handle)?)
    })
}

pub fn cuMemPoolDestroy(pool: u64) -> CUresult {
    status(|| stream_ordered::find(pool)?.0.pools.destroy(pool))
}

/// Attributes 1 to 3 have 32 bits, the others 64.
pub unsafe fn cuMemPoolGetAttribute(pool: u64, attribute: u32, value: *mut c_void) -> CUresult {
    status(|| {
        let number = stream_ordered::find(pool)?.1.attribute(attribute)?;
        match attribute {
            // SAFETY: null or room for this attribute, by the caller's promise.
            1..=3 => unsafe { put(value.cast(), number as u32) },
            // SAFETY: as above.
            _ => unsafe { put(value.cast(), number) },
        }
    })
}

pub unsafe fn cuMemPoolSetAttribute(pool: u64, attribute: u32, value: *mut c_void) -> CUresult {
    status(|| {
        ensure(!value.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let number = match attribute {
            // SAFETY: not null, so a value of this attribute by the caller's promise.
            1..=3 => unsafe { value.cast::<u32>().read_unaligned() }.into(),
            // SAFETY: as above.
            _ => unsafe { value.cast::<u64>().read_unaligned() },
        };
        stream_ordered::find(pool)?.1.set_attribute(attribute, number)
    })
}

pub fn cuMemPoolTrimTo(pool: u64, keep: usize) -> CUresult {
    status(|| {
        let (_, found) = stream_ordered::find(pool)?;
        found.ensure_own()?;
        found.trim(keep as u64);
        Ok(())
    })
}

/// Lets devices access the pool's present and future allocations. The device itself always has access, and other devices'
/// access is to all memory of the device, as with `cuCtxEnablePeerAccess`.
pub fn cuMemPoolSetAccess(pool: u64, descriptors: InArray<CUmemAccessDesc>, count: Count) -> CUresult {
    status(|| {
        let descriptors = descriptors.values(count)?;
        ensure(!descriptors.is_empty(), CUDA_ERROR_INVALID_VALUE)?;
        let (owner, found) = stream_ordered::find(pool)?;
        for access in descriptors {
            ensure(access.location_type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_NOT_SUPPORTED)?;
            let other = device(access.location_id)?.ordinal;
            let open = access.flags == CU_MEM_ACCESS_READWRITE;
            ensure(open || access.flags == 0, CUDA_ERROR_INVALID_VALUE)?;
            ensure(open || other != owner.ordinal, CUDA_ERROR_INVALID_DEVICE)?;
            if other == owner.ordinal {
                continue;
            }
            ensure(config().peers || !open, CUDA_ERROR_INVALID_DEVICE)?;
            match open {
                true => found.access.fetch_or(1 << other, Ordering::SeqCst),
                false => found.access.fetch_and(!(1 << other), Ordering::SeqCst),
            };
            let theirs = if found.source.is_some() { owner.pools.allocations(pool) } else { Vec::new() };
            if found.source.is_none() {
                owner.memory.set_peer(other, open);
            }
            space::change_all(|region| {
                // Of pools of other processes, only this one's memory is.
                let is_it = match region.kind {
                    Kind::Device => found.source.is_none(),
                    Kind::Opened => theirs.contains(&region.base),
                    _ => false,
                };
                if region.device == owner.ordinal && is_it {
                    let bit = 1 << other;
                    region.readers = if open { region.readers | bit } else { region.readers & !bit };
                    region.writers = if open { region.writers | bit } else { region.writers & !bit };
                }
            });
        }
        Ok(())
    })
}

pub unsafe fn cuMemPoolGetAccess(flags: *mut c_void, pool: u64, location: In<CUmemLocation>) -> CUresult {
    status(|| {
        let id = location.read()?.id;
        let (owner, found) = stream_ordered::find(pool)?;
        let other = device(id).map_err(|_| CUDA_ERROR_INVALID_VALUE)?.ordinal;
        let open = other == owner.ordinal || found.access.load(Ordering::SeqCst) & (1 << other) != 0;
        // SAFETY: null or room for flags, by the caller's promise.
        unsafe { put(flags.cast(), if open { CU_MEM_ACCESS_READWRITE } else { 0 }) }
    })
}

pub fn cuMemAllocAsync(out: Out<CUdeviceptr>, bytes: usize, stream: CUstream) -> CUresult {
    status(|| {
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        if let Some(captured) = hook::allocate(stream, bytes, None) {
            return out.put(captured?);
        }
        let stream = current::stream(stream)?;
        if bytes == 0 {
            return out.put(0);
        }
        let pool = stream.context()?.device.pools.current();
        out.put(stream_ordered::allocate(&stream, pool, bytes as u64)?)
    })
}

pub fn cuMemAllocFromPoolAsync(out: Out<CUdeviceptr>, bytes: usize, pool: u64, stream: CUstream) -> CUresult {
    status(|| {
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let device = stream_ordered::find(pool)?.0.ordinal as i32;
        if let Some(captured) = hook::allocate(stream, bytes, Some(device)) {
            return out.put(captured?);
        }
        let stream = current::stream(stream)?;
        if bytes == 0 {
            stream_ordered::find(pool)?;
            return out.put(0);
        }
        out.put(stream_ordered::allocate(&stream, pool, bytes as u64)?)
    })
}

pub fn cuMemFreeAsync(pointer: CUdeviceptr, stream: CUstream) -> CUresult {
    status(|| match hook::free_async(pointer, stream) {
        Some(code) => ensure(code == CUDA_SUCCESS, code),
        None => match (current::stream(stream)?, pointer) {
            (_, 0) => Ok(()),
            (stream, pointer) => stream_ordered::free(&stream, pointer),
        },
    })
}

//! Stream-ordered allocation and its pools.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use rekindle_cuda_abi::types::{
    CU_MEM_ACCESS_READWRITE, CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_DEVICE,
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, CUdevice, CUdeviceptr, CUmemAccessDesc,
    CUmemPoolProps, CUresult, CUstream,
};

use rekindle_graphs::hook;

use crate::config::config;
use crate::device::{Device, device};
use crate::memory::space::{self, Kind};
use crate::status::{Result, ensure, put, status};
use crate::{current, stream_ordered};

pub unsafe fn cuDeviceGetDefaultMemPool(out: *mut c_void, dev: CUdevice) -> CUresult {
    status(|| unsafe { put(out.cast(), device(dev)?.pools.default()) })
}

pub unsafe fn cuDeviceGetMemPool(out: *mut c_void, dev: CUdevice) -> CUresult {
    status(|| unsafe { put(out.cast(), named(dev)?.pools.current()) })
}

/// Of a device that there is not these calls say that it is a wrong value.
fn named(dev: CUdevice) -> Result<&'static Device> {
    device(dev).map_err(|_| CUDA_ERROR_INVALID_VALUE)
}

/// The device that a location and a type of allocation name.
unsafe fn located(location: *mut c_void, kind: u64) -> Result<CUdevice> {
    ensure(!location.is_null(), CUDA_ERROR_INVALID_VALUE)?;
    let [place, id] = unsafe { location.cast::<[i32; 2]>().read_unaligned() };
    // An enumeration: the upper half of its register means nothing.
    ensure(kind as u32 == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_NOT_SUPPORTED)?;
    ensure(place == CU_MEM_LOCATION_TYPE_DEVICE as i32, CUDA_ERROR_NOT_SUPPORTED)?;
    Ok(id)
}

pub unsafe fn cuMemGetDefaultMemPool(out: *mut c_void, location: *mut c_void, kind: u64) -> CUresult {
    status(|| unsafe { put(out.cast(), device(located(location, kind)?)?.pools.default()) })
}

pub unsafe fn cuMemGetMemPool(out: *mut c_void, location: *mut c_void, kind: u64) -> CUresult {
    status(|| unsafe { put(out.cast(), device(located(location, kind)?)?.pools.current()) })
}

pub unsafe fn cuMemSetMemPool(location: *mut c_void, kind: u64, pool: u64) -> CUresult {
    status(|| device(unsafe { located(location, kind) }?)?.pools.set_current(pool))
}

pub unsafe fn cuDeviceSetMemPool(dev: CUdevice, pool: u64) -> CUresult {
    status(|| named(dev)?.pools.set_current(pool))
}

pub unsafe fn cuMemPoolCreate(out: *mut c_void, properties: *const c_void) -> CUresult {
    status(|| {
        ensure(!out.is_null() && !properties.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let properties = unsafe { properties.cast::<CUmemPoolProps>().read_unaligned() };
        ensure(properties.kind == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE)?;
        let on_device = properties.location_type == CU_MEM_LOCATION_TYPE_DEVICE;
        ensure(on_device && properties.handle_types == 0, CUDA_ERROR_NOT_SUPPORTED)?;
        unsafe { put(out.cast(), named(properties.location_id)?.pools.create()) }
    })
}

pub unsafe fn cuMemPoolDestroy(pool: u64) -> CUresult {
    status(|| stream_ordered::find(pool)?.0.pools.destroy(pool))
}

/// The attributes 1 to 3 are of 32 bits, the others of 64.
pub unsafe fn cuMemPoolGetAttribute(pool: u64, attribute: u32, value: *mut c_void) -> CUresult {
    status(|| {
        let number = stream_ordered::find(pool)?.1.attribute(attribute)?;
        match attribute {
            1..=3 => unsafe { put(value.cast(), number as u32) },
            _ => unsafe { put(value.cast(), number) },
        }
    })
}

pub unsafe fn cuMemPoolSetAttribute(pool: u64, attribute: u32, value: *mut c_void) -> CUresult {
    status(|| {
        ensure(!value.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let number = match attribute {
            1..=3 => unsafe { value.cast::<u32>().read_unaligned() }.into(),
            _ => unsafe { value.cast::<u64>().read_unaligned() },
        };
        stream_ordered::find(pool)?.1.set_attribute(attribute, number)
    })
}

pub unsafe fn cuMemPoolTrimTo(pool: u64, keep: usize) -> CUresult {
    status(|| stream_ordered::find(pool).map(|(_, found)| found.trim(keep as u64)))
}

/// Lets devices into what is and will be allocated. The device's own access is always there, and that of others is to
/// all memory of the device, as with `cuCtxEnablePeerAccess`.
pub unsafe fn cuMemPoolSetAccess(pool: u64, descriptors: *const CUmemAccessDesc, count: usize) -> CUresult {
    status(|| {
        ensure(!descriptors.is_null() && count > 0, CUDA_ERROR_INVALID_VALUE)?;
        let (owner, found) = stream_ordered::find(pool)?;
        for i in 0..count {
            let access = unsafe { descriptors.add(i).read_unaligned() };
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
            owner.memory.set_peer(other, open);
            space::change_all(|region| {
                if region.device == owner.ordinal && region.kind == Kind::Device {
                    let bit = 1 << other;
                    region.readers = if open { region.readers | bit } else { region.readers & !bit };
                    region.writers = if open { region.writers | bit } else { region.writers & !bit };
                }
            });
        }
        Ok(())
    })
}

pub unsafe fn cuMemPoolGetAccess(flags: *mut c_void, pool: u64, location: *mut c_void) -> CUresult {
    status(|| {
        ensure(!location.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let [_, id] = unsafe { location.cast::<[i32; 2]>().read_unaligned() };
        let (owner, found) = stream_ordered::find(pool)?;
        let other = device(id).map_err(|_| CUDA_ERROR_INVALID_VALUE)?.ordinal;
        let open = other == owner.ordinal || found.access.load(Ordering::SeqCst) & (1 << other) != 0;
        unsafe { put(flags.cast(), if open { CU_MEM_ACCESS_READWRITE } else { 0 }) }
    })
}

pub unsafe fn cuMemAllocAsync(out: *mut CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult {
    status(|| {
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        if let Some(captured) = hook::allocate(stream, bytes, None) {
            return unsafe { put(out, captured?) };
        }
        let stream = current::stream(stream)?;
        if bytes == 0 {
            return unsafe { put(out, 0) };
        }
        let pool = stream.context()?.device.pools.current();
        unsafe { put(out, stream_ordered::allocate(&stream, pool, bytes as u64)?) }
    })
}

pub unsafe fn cuMemAllocFromPoolAsync(out: *mut CUdeviceptr, bytes: usize, pool: u64, stream: CUstream) -> CUresult {
    status(|| {
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let device = stream_ordered::find(pool)?.0.ordinal as i32;
        if let Some(captured) = hook::allocate(stream, bytes, Some(device)) {
            return unsafe { put(out, captured?) };
        }
        let stream = current::stream(stream)?;
        if bytes == 0 {
            stream_ordered::find(pool)?;
            return unsafe { put(out, 0) };
        }
        unsafe { put(out, stream_ordered::allocate(&stream, pool, bytes as u64)?) }
    })
}

pub unsafe fn cuMemFreeAsync(pointer: CUdeviceptr, stream: CUstream) -> CUresult {
    status(|| match hook::free_async(pointer, stream) {
        Some(code) => ensure(code == CUDA_SUCCESS, code),
        None => match (current::stream(stream)?, pointer) {
            (_, 0) => Ok(()),
            (stream, pointer) => stream_ordered::free(&stream, pointer),
        },
    })
}

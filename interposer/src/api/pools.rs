//! Stream-ordered allocation and its pools. The worker keeps the pools; memory of theirs lies in the devices' windows
//! as other device memory does.

use std::ffi::c_void;

use rekindle_cuda_abi::raw::read;
use rekindle_cuda_abi::types::*;
use rekindle_graphs::hook;
use rekindle_wire::command::{
    Kind, POOL_ALLOC, POOL_CREATE, POOL_CURRENT, POOL_DESTROY, POOL_FREE, POOL_GET, POOL_GET_ACCESS, POOL_SET,
    POOL_SET_ACCESS, POOL_SET_CURRENT, POOL_TRIM, PoolAlloc, PoolCreate, PoolCurrent, PoolDestroy, PoolFree, PoolGet,
    PoolGetAccess, PoolSet, PoolSetAccess, PoolSetCurrent, PoolTrim, WINDOW_FULL, default_pool,
};

use super::{check, code, pool_sharing, put};
use crate::call::{Call, stream_of};
use crate::operations::device_memory::reserve_window;
use crate::process::log;
use crate::state::client;
use crate::state::idle;
use crate::state::memory::Allocation;
use crate::state::pools::Imported;

/// Memory on the host, and handles for other processes, that the driver could give and this does not.
fn refused<T>(what: &'static str) -> Result<T, CUresult> {
    log::refused(what);
    Err(CUDA_ERROR_NOT_SUPPORTED)
}

/// These calls return `CUDA_ERROR_INVALID_VALUE` for an unknown device.
fn wrong_value(error: CUresult) -> CUresult {
    if error == CUDA_ERROR_INVALID_DEVICE { CUDA_ERROR_INVALID_VALUE } else { error }
}

/// The device of a location, which must be one.
fn device_of(location: CUmemLocation, what: &'static str) -> Result<CUdevice, CUresult> {
    match location.kind {
        CU_MEM_LOCATION_TYPE_DEVICE => Ok(location.id),
        kind if kind <= CU_MEM_LOCATION_TYPE_LAST && kind != 0 => refused(what),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

pub(crate) unsafe fn cuDeviceGetDefaultMemPool(out: *mut c_void, dev: CUdevice) -> CUresult {
    code(client::get().and_then(|client| {
        let device = client.devices.number(dev)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(out.cast(), default_pool(device)) }
    }))
}

/// The worker's number of a device.
fn device(ordinal: CUdevice) -> Result<u64, CUresult> {
    Ok(client::get()?.devices.number(ordinal)? as u64)
}

pub(crate) unsafe fn cuDeviceGetMemPool(out: *mut c_void, dev: CUdevice) -> CUresult {
    code(Call::new(POOL_CURRENT).and_then(|mut call| {
        call.put(&PoolCurrent { device: device(dev).map_err(wrong_value)? });
        let (result, mut reply) = call.wait();
        check(result)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(out.cast(), reply.word().ok_or(CUDA_ERROR_UNKNOWN)?) }
    }))
}

pub(crate) unsafe fn cuDeviceSetMemPool(dev: CUdevice, pool: u64) -> CUresult {
    code(Call::new(POOL_SET_CURRENT).and_then(|mut call| {
        call.put(&PoolSetCurrent { device: device(dev).map_err(wrong_value)?, pool });
        check(call.wait().0)
    }))
}

/// The device of a location and a type of allocation, for the calls that take both in place of a device.
///
/// # Safety
/// `location` is null or a `CUmemLocation`.
unsafe fn located(location: *mut CUmemLocation, kind: u64, what: &'static str) -> Result<CUdevice, CUresult> {
    // SAFETY: the caller's promise.
    let location = unsafe { read(location) }?;
    // An enumeration: the upper half of its register means nothing.
    if kind as u32 != CU_MEM_ALLOCATION_TYPE_PINNED {
        return if kind as u32 == 2 { refused(what) } else { Err(CUDA_ERROR_INVALID_VALUE) };
    }
    device_of(location, what)
}

pub(crate) unsafe fn cuMemGetDefaultMemPool(out: *mut c_void, location: *mut CUmemLocation, kind: u64) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(unsafe { located(location, kind, "cuMemGetDefaultMemPool of host memory") }.and_then(|device| {
        // SAFETY: the caller's promise by cuda.h.
        check(unsafe { cuDeviceGetDefaultMemPool(out, device) })
    }))
}

pub(crate) unsafe fn cuMemGetMemPool(out: *mut c_void, location: *mut CUmemLocation, kind: u64) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(unsafe { located(location, kind, "cuMemGetMemPool of host memory") }.and_then(|device| {
        // SAFETY: the caller's promise by cuda.h.
        check(unsafe { cuDeviceGetMemPool(out, device) })
    }))
}

pub(crate) unsafe fn cuMemSetMemPool(location: *mut CUmemLocation, kind: u64, pool: u64) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(unsafe { located(location, kind, "cuMemSetMemPool of host memory") }.and_then(|device| {
        // SAFETY: no pointers.
        check(unsafe { cuDeviceSetMemPool(device, pool) })
    }))
}

pub(crate) unsafe fn cuMemPoolCreate(out: *mut c_void, properties: *const c_void) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(unsafe { read(properties.cast::<CUmemPoolProps>()) }.and_then(|wanted| {
        if out.is_null()
            || wanted.kind != CU_MEM_ALLOCATION_TYPE_PINNED
            || wanted.reserved != [0; 54]
            || wanted.security_attributes != 0
        {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let location = CUmemLocation { kind: wanted.location_type, id: wanted.location_id };
        let device = device_of(location, "cuMemPoolCreate of host memory")?;
        if wanted.handle_types & !CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0 {
            return refused("cuMemPoolCreate for other handles than files");
        }
        let mut call = Call::new(POOL_CREATE)?;
        let client = client::get()?;
        let handle = client.fresh(Kind::MemPool);
        let device = client.devices.number(device).map_err(wrong_value)? as u64;
        call.put(&PoolCreate { pool: handle, device, maximum: wanted.maximum as u64 });
        check(call.wait().0)?;
        if wanted.handle_types != 0 {
            client.pools.lock().created(handle, wanted.handle_types);
        }
        // SAFETY: not null, writable by cuda.h's contract.
        unsafe { put(out.cast(), handle) }
    }))
}

pub(crate) unsafe fn cuMemPoolDestroy(pool: u64) -> CUresult {
    code(client::get().and_then(|client| {
        if let Some(destroyed) = pool_sharing::destroy(client, pool) {
            return destroyed;
        }
        let mut call = Call::new(POOL_DESTROY)?;
        call.put(&PoolDestroy { pool });
        check(call.wait().0)?;
        client.pools.lock().destroyed(pool);
        Ok(())
    }))
}

/// The attributes 1 to 3 are of 32 bits, the others of 64.
fn is_small(attribute: u32) -> bool {
    (1..=3).contains(&attribute)
}

pub(crate) unsafe fn cuMemPoolGetAttribute(pool: u64, attribute: u32, value: *mut c_void) -> CUresult {
    code(Call::new(POOL_GET).and_then(|mut call| {
        pool_sharing::not_imported(client::get()?, pool)?;
        call.put(&PoolGet { pool, attribute });
        let (result, mut reply) = call.wait();
        check(result)?;
        let number = reply.word().ok_or(CUDA_ERROR_UNKNOWN)?;
        // SAFETY: the caller's promise by cuda.h: room for the attribute's type.
        unsafe { if is_small(attribute) { put(value.cast(), number as u32) } else { put(value.cast(), number) } }
    }))
}

pub(crate) unsafe fn cuMemPoolSetAttribute(pool: u64, attribute: u32, value: *mut c_void) -> CUresult {
    code(Call::new(POOL_SET).and_then(|mut call| {
        // SAFETY: the caller's promise by cuda.h: a value of the attribute's type.
        let number = unsafe {
            if is_small(attribute) { u64::from(read(value.cast::<u32>())?) } else { read(value.cast::<u64>())? }
        };
        pool_sharing::not_imported(client::get()?, pool)?;
        call.put(&PoolSet { pool, attribute, value: number });
        check(call.wait().0)
    }))
}

pub(crate) unsafe fn cuMemPoolTrimTo(pool: u64, keep: usize) -> CUresult {
    code(Call::new(POOL_TRIM).and_then(|mut call| {
        pool_sharing::not_imported(client::get()?, pool)?;
        call.put(&PoolTrim { pool, keep: keep as u64 });
        check(call.wait().0)
    }))
}

pub(crate) unsafe fn cuMemPoolSetAccess(pool: u64, list: *const CUmemAccessDesc, count: usize) -> CUresult {
    code(client::get().and_then(|client| {
        if list.is_null() || count == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        for i in 0..count {
            // SAFETY: cuda.h has the list hold `count` elements.
            let wanted = unsafe { list.add(i).read_unaligned() };
            let location = CUmemLocation { kind: wanted.location_type, id: wanted.location_id };
            let device = device_of(location, "cuMemPoolSetAccess of the host")?;
            let device = client.devices.number(device)?;
            let set = |it: &mut Imported| pool_sharing::set_access(client, it, device, wanted.flags);
            if let Some(set) = pool_sharing::with_imported(client, pool, set) {
                set?;
                continue;
            }
            let mut call = Call::new(POOL_SET_ACCESS)?;
            call.put(&PoolSetAccess { pool, device: device as u64, access: wanted.flags });
            check(call.wait().0)?;
        }
        Ok(())
    }))
}

pub(crate) unsafe fn cuMemPoolGetAccess(flags: *mut c_void, pool: u64, location: *mut CUmemLocation) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(unsafe { read(location) }.and_then(|location| {
        let mut call = Call::new(POOL_GET_ACCESS)?;
        let ordinal = device_of(location, "cuMemPoolGetAccess of the host")?;
        let device = device(ordinal).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        let allows = |it: &mut Imported| Ok(it.access.contains(&(device as usize)));
        let access = match pool_sharing::with_imported(client::get()?, pool, allows) {
            Some(open) => {
                if open? {
                    CU_MEM_ACCESS_READWRITE
                } else {
                    0
                }
            }
            None => {
                call.put(&PoolGetAccess { pool, device });
                let (result, mut reply) = call.wait();
                check(result)?;
                reply.word().ok_or(CUDA_ERROR_UNKNOWN)? as u32
            }
        };
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(flags.cast(), access) }
    }))
}

/// `pool` 0 is the current one of the stream's device.
fn allocate(out: *mut CUdeviceptr, size: usize, pool: u64, stream: CUstream) -> CUresult {
    code(client::get().and_then(|client| {
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if size == 0 {
            client.contexts.current()?;
            // SAFETY: not null, writable by cuda.h's contract.
            return unsafe { put(out, 0) };
        }
        loop {
            let mut call = Call::in_context(POOL_ALLOC)?;
            call.put(&PoolAlloc { pool, bytes: size as u64, stream: stream_of(stream)? });
            let (result, mut reply) = call.wait();
            let mut word = || reply.word().ok_or(CUDA_ERROR_UNKNOWN);
            if result == WINDOW_FULL {
                let (end, device) = (word()?, word()?);
                reserve_window(client, device as usize, end)?;
                continue;
            }
            check(result)?;
            let (base, device, pool) = (word()?, word()? as usize, word()?);
            idle::has_pools();
            client.memory.insert(Allocation::Pooled { base, size: size as u64, device, pool });
            // SAFETY: not null, writable by cuda.h's contract.
            return unsafe { put(out, base) };
        }
    }))
}

/// The answer of an allocation that a capture takes, on a device or on the stream's.
///
/// # Safety
/// `out` is null or writable.
unsafe fn captured(out: *mut CUdeviceptr, size: usize, stream: CUstream, device: Option<CUdevice>) -> Option<CUresult> {
    if out.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    hook::allocate(stream, size, device).map(|made| code(made.and_then(|address| unsafe { put(out, address) })))
}

pub(crate) unsafe fn cuMemAllocAsync(out: *mut CUdeviceptr, size: usize, stream: CUstream) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    if let Some(answer) = unsafe { captured(out, size, stream, None) } {
        return answer;
    }
    allocate(out, size, 0, stream)
}

pub(crate) unsafe fn cuMemAllocFromPoolAsync(
    out: *mut CUdeviceptr,
    size: usize,
    pool: u64,
    stream: CUstream,
) -> CUresult {
    if !Kind::MemPool.owns(pool) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: the caller's promise by cuda.h.
    if let Some(answer) = unsafe { captured(out, size, stream, None) } {
        return answer;
    }
    allocate(out, size, pool, stream)
}

pub(crate) unsafe fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) -> CUresult {
    if let Some(answer) = hook::free_async(address, stream) {
        return answer;
    }
    code(Call::in_context(POOL_FREE).and_then(|mut call| {
        let client = client::get()?;
        if address == 0 {
            return Ok(());
        }
        match client.memory.at(address) {
            Some(Allocation::Device { base, .. } | Allocation::Pooled { base, .. }) if base == address => {}
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        let stream = stream_of(stream)?;
        if let Some(freed) = pool_sharing::free(client, address) {
            return freed;
        }
        call.put(&PoolFree { address, stream });
        // Forgotten first: another thread may be given the address at once.
        client.memory.remove(address);
        check(call.send())
    }))
}

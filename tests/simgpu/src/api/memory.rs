//! Device memory that is allocated by the byte.

use rekindle_cuda_abi::arguments::Out;
use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND, CUDA_SUCCESS, CUdeviceptr, CUresult};
use rekindle_graphs::hook;

use crate::current;
use crate::device::devices;
use crate::memory::ipc_pool;
use crate::memory::managed;
use crate::memory::space::{self, Kind, Region};
use crate::status::{Result, ensure, status};

fn allocate(out: Out<CUdeviceptr>, bytes: u64) -> Result<()> {
    let context = current::healthy()?;
    ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
    let base = context.device.allocate(context.handle, Kind::Device, bytes)?;
    out.put(base)
}

pub fn cuMemAlloc_v2(out: Out<CUdeviceptr>, bytes: usize) -> CUresult {
    status(|| allocate(out, bytes as u64))
}

/// Rows are padded for the alignment that copies and textures prefer.
pub fn cuMemAllocPitch_v2(
    out: Out<CUdeviceptr>,
    pitch: Out<usize>,
    width: usize,
    height: usize,
    element: u32,
) -> CUresult {
    status(|| {
        ensure(matches!(element, 4 | 8 | 16) && width > 0 && height > 0, CUDA_ERROR_INVALID_VALUE)?;
        let row = width.checked_next_multiple_of(512).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let bytes = row.checked_mul(height).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        pitch.put(row)?;
        allocate(out, bytes as u64)
    })
}

/// Waits, as the driver does, for commands that may still use the memory.
pub fn cuMemFree_v2(pointer: CUdeviceptr) -> CUresult {
    status(|| {
        // This works without a current context, too: the address determines the owner.
        let current = if current::handle() == 0 { None } else { Some(current::healthy()?) };
        if pointer == 0 {
            return Ok(());
        }
        if let Some(code) = hook::free(pointer) {
            current.map_or_else(current::current, Ok)?.synchronize()?;
            return ensure(code == CUDA_SUCCESS, code);
        }
        if let Some(region) = space::find(pointer).filter(|r| r.base == pointer && ipc_pool::is_open(pointer)) {
            return ipc_pool::close(devices().get(region.device).ok_or(CUDA_ERROR_INVALID_VALUE)?, pointer);
        }
        let region = allocation(pointer)?;
        let context = current.map_or_else(|| current::named(region.context), Ok)?;
        context.check()?;
        // For memory from a pool the call relies on the program that nothing uses it.
        if devices().get(region.device).is_some_and(|d| d.pools.origin(region.base).is_some()) {
            return release(&region);
        }
        context.synchronize()?;
        if let Ok(owner) = current::named(region.context) {
            owner.synchronize()?;
        }
        release(&region)
    })
}

fn allocation(base: u64) -> Result<Region> {
    let region = space::find(base).filter(|r| r.base == base && matches!(r.kind, Kind::Device | Kind::Managed));
    region.ok_or(CUDA_ERROR_INVALID_VALUE)
}

fn release(region: &Region) -> Result<()> {
    let device = devices().get(region.device).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let gone = space::remove(region.base, |r| r.id == region.id).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if gone.kind == Kind::Managed {
        managed::release(&gone);
        return Ok(());
    }
    device.pools.forget(gone.base, gone.len);
    device.reclaim(&gone);
    Ok(())
}

pub fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> CUresult {
    status(|| {
        let device = current::healthy()?.device;
        free.put(device.memory.free() as usize)?;
        total.put(device.memory.total as usize)
    })
}

pub fn cuMemGetAddressRange_v2(base: Out<CUdeviceptr>, size: Out<usize>, pointer: CUdeviceptr) -> CUresult {
    status(|| {
        current::healthy()?;
        let region = space::find(pointer).ok_or(CUDA_ERROR_NOT_FOUND)?;
        base.put_if(region.base);
        size.put_if(region.len as usize);
        Ok(())
    })
}

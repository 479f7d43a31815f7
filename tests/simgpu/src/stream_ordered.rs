//! Stream-ordered allocation: memory is taken from a pool in the call, and returned when the stream comes to the free.

use std::sync::Arc;

use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY};

use crate::device::{Device, devices};
use crate::memory::ipc_pool;
use crate::memory::space::{self, Kind};
use crate::pool::Pool;
use crate::status::{Result, ensure};
use crate::stream::Stream;

/// Ends the pools of a device that is reset, and their allocations.
pub(crate) fn reset(device: &Device) {
    for base in device.pools.reset() {
        // As often as it was imported.
        while ipc_pool::is_open(base) && ipc_pool::close(device, base).is_ok() {}
        if let Some(region) = space::remove(base, |r| r.kind == Kind::Device) {
            device.pools.forget(base, region.len);
            device.reclaim(&region);
        }
    }
    device.pools.release();
}

/// The device and the pool that a handle names.
pub(crate) fn find(handle: u64) -> Result<(&'static Device, Arc<Pool>)> {
    let found = devices().iter().find_map(|device| Some((device, device.pools.get(handle).ok()?)));
    found.ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// Allocates in a stream's order: memory of the same size that the stream frees before can be used at once; for other sizes the
/// call can wait.
pub(crate) fn allocate(stream: &Arc<Stream>, pool: u64, bytes: u64) -> Result<u64> {
    let context = stream.context()?;
    let (device, pool) = find(pool)?;
    ensure(pool.source.is_none(), CUDA_ERROR_INVALID_VALUE)?;
    if let Some(base) = device.pools.reuse(pool.handle, bytes, stream.id) {
        device.pools.note(base, pool, bytes);
        return Ok(base);
    }
    let take = || device.allocate(0, Kind::Device, bytes);
    let base = match take() {
        Err(CUDA_ERROR_OUT_OF_MEMORY) => {
            stream.synchronize()?;
            match take() {
                // Another stream may still have frees ahead.
                Err(CUDA_ERROR_OUT_OF_MEMORY) => context.synchronize().and_then(|()| take())?,
                other => other?,
            }
        }
        other => other?,
    };
    context.check()?;
    device.pools.note(base, pool, bytes);
    Ok(base)
}

/// Frees the memory when the stream comes to this command.
pub(crate) fn free(stream: &Arc<Stream>, base: u64) -> Result<()> {
    if let Some(region) = space::find(base).filter(|r| r.base == base && ipc_pool::is_open(base)) {
        let device = devices().get(region.device).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        stream.submit(move |_| ipc_pool::close(device, base))?;
        return Ok(());
    }
    let region = space::find(base).filter(|r| r.base == base && r.kind == Kind::Device);
    let region = region.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let device = devices().get(region.device).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let number = device.pools.leave(base, region.len, stream.id).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    stream.submit(move |_| {
        if !device.pools.left(base, number) {
            return Ok(());
        }
        let region = space::remove(base, |r| r.kind == Kind::Device).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        device.reclaim(&region);
        Ok(())
    })?;
    Ok(())
}

//! Contexts that programs create, and the stack of current ones.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
    CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY, CUcontext, CUdevice, CUresult,
};

use crate::config::config;
use crate::context::Context;
use crate::contexts;
use crate::current;
use crate::device::{device, devices};
use crate::handles;
use crate::memory::space::{self, Kind};
use crate::status::{Result, ensure, put, put_if, status};

/// Of the ways in which the CPU may wait a context has one; what lies beyond them are single bits.
pub(super) fn check_flags(flags: u32) -> Result<()> {
    const SCHEDULING: u32 = 7;
    ensure(flags & !0xff == 0 && matches!(flags & SCHEDULING, 0 | 1 | 2 | 4), CUDA_ERROR_INVALID_VALUE)
}

pub unsafe fn cuCtxCreate_v2(out: *mut CUcontext, flags: u32, dev: CUdevice) -> CUresult {
    status(|| {
        check_flags(flags)?;
        let device = device(dev)?;
        crate::context::process_is_well()?;
        let handle = handles::next();
        unsafe { put(out, handle) }?;
        handles::insert(handle, contexts::create(handle, device, flags));
        current::push(handle);
        Ok(())
    })
}

pub unsafe fn cuCtxCreate_v3(
    out: *mut CUcontext,
    affinities: *mut c_void,
    count: i32,
    flags: u32,
    dev: CUdevice,
) -> CUresult {
    if !affinities.is_null() && count != 0 {
        return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
    }
    unsafe { cuCtxCreate_v2(out, flags, dev) }
}

pub unsafe fn cuCtxCreate(out: *mut CUcontext, flags: u32, dev: CUdevice) -> CUresult {
    unsafe { cuCtxCreate_v2(out, flags, dev) }
}

/// Execution affinities are a matter of MPS; without it there are none, of whatever kind.
pub unsafe fn cuDeviceGetExecAffinitySupport(supported: *mut i32, kind: u32, dev: CUdevice) -> CUresult {
    status(|| {
        device(dev)?;
        let _ = kind;
        unsafe { put(supported, 0) }
    })
}

pub unsafe fn cuCtxGetExecAffinity(affinity: *mut c_void, kind: u32) -> CUresult {
    status(|| {
        let context = current::current()?;
        ensure(!affinity.is_null() && kind == 0, CUDA_ERROR_INVALID_VALUE)?;
        // All of the device's multiprocessors.
        let all = crate::attributes::value(16, context.device.ordinal as CUdevice).unwrap_or(0) as u32;
        unsafe { affinity.cast::<[u32; 2]>().write_unaligned([kind, all]) };
        Ok(())
    })
}

/// Counts another user of the current context.
pub unsafe fn cuCtxAttach(out: *mut CUcontext, flags: u32) -> CUresult {
    status(|| {
        ensure(!out.is_null() && flags == 0, CUDA_ERROR_INVALID_VALUE)?;
        current::current()?.attached.fetch_add(1, Ordering::Relaxed);
        unsafe { put(out, current::handle()) }
    })
}

/// Takes a user from the current context; without any left it is destroyed.
pub unsafe fn cuCtxDetach(context: CUcontext) -> CUresult {
    let mut last = false;
    let result = status(|| {
        let current = current::current()?;
        ensure(current::handle() == context, CUDA_ERROR_INVALID_CONTEXT)?;
        let fewer = |users: u32| users.checked_sub(1);
        last = current.attached.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer).is_err();
        Ok(())
    });
    if last { unsafe { cuCtxDestroy_v2(context) } } else { result }
}

pub unsafe fn cuCtxCreate_v4(out: *mut CUcontext, parameters: *mut c_void, flags: u32, dev: CUdevice) -> CUresult {
    // Execution affinities, their number, and an interop context: nothing of that is supported.
    if !parameters.is_null() && unsafe { parameters.cast::<[u64; 3]>().read_unaligned() } != [0; 3] {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    unsafe { cuCtxCreate_v2(out, flags, dev) }
}

pub unsafe fn cuCtxDestroy_v2(context: CUcontext) -> CUresult {
    status(|| {
        ensure(context != 0, CUDA_ERROR_INVALID_VALUE)?;
        let Ok(object) = handles::get::<Context>(context) else {
            return Err(CUDA_ERROR_INVALID_CONTEXT);
        };
        contexts::end(&object);
        handles::remove(context);
        current::forget(context);
        Ok(())
    })
}

pub unsafe fn cuCtxDestroy(context: CUcontext) -> CUresult {
    unsafe { cuCtxDestroy_v2(context) }
}

pub unsafe fn cuCtxPushCurrent_v2(context: CUcontext) -> CUresult {
    status(|| {
        ensure(context != 0, CUDA_ERROR_INVALID_VALUE)?;
        current::ensure_known(context)?;
        current::push(context);
        Ok(())
    })
}

pub unsafe fn cuCtxPushCurrent(context: CUcontext) -> CUresult {
    unsafe { cuCtxPushCurrent_v2(context) }
}

pub unsafe fn cuCtxPopCurrent_v2(context: *mut CUcontext) -> CUresult {
    status(|| {
        let popped = current::pop()?;
        unsafe { put_if(context, popped) };
        Ok(())
    })
}

pub unsafe fn cuCtxPopCurrent(context: *mut CUcontext) -> CUresult {
    unsafe { cuCtxPopCurrent_v2(context) }
}

pub unsafe fn cuCtxSetCurrent(context: CUcontext) -> CUresult {
    status(|| {
        if context != 0 {
            current::ensure_known(context)?;
        }
        current::set(context);
        Ok(())
    })
}

pub unsafe fn cuCtxGetCurrent(context: *mut CUcontext) -> CUresult {
    status(|| unsafe { put(context, current::handle()) })
}

pub unsafe fn cuCtxGetDevice(out: *mut CUdevice) -> CUresult {
    unsafe { cuCtxGetDevice_v2(out, 0) }
}

pub unsafe fn cuCtxGetDevice_v2(out: *mut CUdevice, context: CUcontext) -> CUresult {
    status(|| {
        let handle = if context == 0 { current::handle() } else { context };
        // A primary context has a device even while it is not active.
        let primary = devices().iter().find(|device| device.primary == handle);
        let ordinal = match primary {
            Some(device) => device.ordinal,
            None => current::or_named(context)?.device.ordinal,
        };
        unsafe { put(out, ordinal as CUdevice) }
    })
}

pub unsafe fn cuCtxGetId(context: CUcontext, id: *mut u64) -> CUresult {
    status(|| unsafe { put(id, current::or_named(context)?.id) })
}

pub unsafe fn cuCtxGetFlags(flags: *mut u32) -> CUresult {
    status(|| unsafe { put(flags, current::current()?.flags.load(Ordering::Relaxed)) })
}

pub unsafe fn cuCtxSetFlags(flags: u32) -> CUresult {
    status(|| {
        check_flags(flags)?;
        current::current()?.flags.store(flags, Ordering::Relaxed);
        Ok(())
    })
}

/// What `cuda.h` has said since 3.2.
pub unsafe fn cuCtxGetApiVersion(context: CUcontext, version: *mut u32) -> CUresult {
    status(|| {
        current::or_named(context)?;
        unsafe { put(version, 3020) }
    })
}

pub unsafe fn cuCtxSynchronize() -> CUresult {
    status(|| {
        let context = current::current()?;
        rekindle_graphs::hook::context_asked(context.handle)?;
        context.synchronize()
    })
}

pub unsafe fn cuCtxSynchronize_v2(context: CUcontext) -> CUresult {
    status(|| {
        let context = current::or_named(context)?;
        rekindle_graphs::hook::context_asked(context.handle)?;
        context.synchronize()
    })
}

pub unsafe fn cuCtxGetLimit(value: *mut usize, limit: u32) -> CUresult {
    status(|| unsafe { put(value, current::healthy()?.limit(limit)?) })
}

pub unsafe fn cuCtxSetLimit(limit: u32, value: usize) -> CUresult {
    status(|| current::healthy()?.set_limit(limit, value))
}

pub unsafe fn cuCtxGetCacheConfig(config: *mut u32) -> CUresult {
    status(|| unsafe { put(config, current::healthy()?.cache_config.load(Ordering::Relaxed)) })
}

pub unsafe fn cuCtxSetCacheConfig(config: u32) -> CUresult {
    status(|| {
        ensure(config <= 3, CUDA_ERROR_INVALID_VALUE)?;
        current::healthy()?.cache_config.store(config, Ordering::Relaxed);
        Ok(())
    })
}

/// Banks are four bytes wide on every current GPU.
pub unsafe fn cuCtxGetSharedMemConfig(config: *mut u32) -> CUresult {
    status(|| {
        current::healthy()?;
        unsafe { put(config, 1) }
    })
}

pub unsafe fn cuCtxSetSharedMemConfig(config: u32) -> CUresult {
    status(|| {
        current::healthy()?;
        ensure(config <= 2, CUDA_ERROR_INVALID_VALUE)
    })
}

/// The least and the greatest priority of streams.
pub(super) const PRIORITIES: [i32; 2] = [0, -5];

pub unsafe fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) -> CUresult {
    status(|| {
        current::current()?;
        unsafe {
            put_if(least, PRIORITIES[0]);
            put_if(greatest, PRIORITIES[1]);
        }
        Ok(())
    })
}

pub unsafe fn cuCtxResetPersistingL2Cache() -> CUresult {
    status(|| current::healthy().map(drop))
}

pub unsafe fn cuCtxEnablePeerAccess(peer: CUcontext, flags: u32) -> CUresult {
    status(|| {
        ensure(flags == 0, CUDA_ERROR_INVALID_VALUE)?;
        let context = current::healthy()?;
        let owner = current::named(peer)?.device;
        let mine = context.device.ordinal;
        ensure(owner.ordinal != mine && config().peers, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)?;
        ensure(context.add_peer(owner.ordinal), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)?;
        owner.memory.set_peer(mine, true);
        open_to_peer(owner.ordinal, mine, true);
        Ok(())
    })
}

pub unsafe fn cuCtxDisablePeerAccess(peer: CUcontext) -> CUresult {
    status(|| {
        let context = current::healthy()?;
        let owner = current::named(peer)?.device;
        let mine = context.device.ordinal;
        ensure(context.remove_peer(owner.ordinal), CUDA_ERROR_PEER_ACCESS_NOT_ENABLED)?;
        owner.memory.set_peer(mine, false);
        open_to_peer(owner.ordinal, mine, false);
        Ok(())
    })
}

/// Lets a device into what another one has allocated, or no longer.
fn open_to_peer(owner: usize, peer: usize, open: bool) {
    space::change_all(|region| {
        if region.device == owner && matches!(region.kind, Kind::Device | Kind::Code | Kind::Internal) {
            let bit = 1 << peer;
            let set = |mask: u64| if open { mask | bit } else { mask & !bit };
            region.readers = set(region.readers);
            region.writers = if region.writers == 0 { 0 } else { set(region.writers) };
        }
    });
}

//! Contexts that programs create, and the stack of current ones.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rekindle_cuda_abi::arguments::Out;
use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
    CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY, CUcontext, CUdevice, CUresult,
};

use crate::config::config;
use crate::context::{Context, FIRST_API_VERSION};
use crate::contexts;
use crate::current;
use crate::device::{device, devices};
use crate::green::{Converted, Green};
use crate::handles;
use crate::memory::space::{self, Kind};
use crate::status::{Result, ensure, read, status};

/// Checks a context's flags: at most one of the ways in which the CPU may wait; the flags beyond these are single bits.
pub(super) fn check_flags(flags: u32) -> Result<()> {
    const SCHEDULING: u32 = 7;
    ensure(flags & !0xff == 0 && matches!(flags & SCHEDULING, 0 | 1 | 2 | 4), CUDA_ERROR_INVALID_VALUE)
}

fn create(out: Out<CUcontext>, flags: u32, dev: CUdevice) -> Result<Arc<Context>> {
    check_flags(flags)?;
    let device = device(dev)?;
    crate::context::process_is_well()?;
    let handle = handles::next();
    out.put(handle)?;
    let context = contexts::create(handle, device, flags)?;
    handles::insert(handle, context.clone());
    current::push(handle);
    Ok(context)
}

pub fn cuCtxCreate_v2(out: Out<CUcontext>, flags: u32, dev: CUdevice) -> CUresult {
    status(|| create(out, flags, dev).map(drop))
}

pub fn cuCtxCreate_v3(out: Out<CUcontext>, affinities: *mut c_void, count: i32, flags: u32, dev: CUdevice) -> CUresult {
    if !affinities.is_null() && count != 0 {
        return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
    }
    cuCtxCreate_v2(out, flags, dev)
}

pub fn cuCtxCreate(out: Out<CUcontext>, flags: u32, dev: CUdevice) -> CUresult {
    status(|| create(out, flags, dev).map(|context| context.api_version.store(FIRST_API_VERSION, Ordering::Relaxed)))
}

/// Execution affinities need MPS; without it none is supported, of whatever kind.
pub fn cuDeviceGetExecAffinitySupport(supported: Out<i32>, kind: u32, dev: CUdevice) -> CUresult {
    status(|| {
        device(dev)?;
        let _ = kind;
        supported.put(0)
    })
}

pub unsafe fn cuCtxGetExecAffinity(affinity: *mut c_void, kind: u32) -> CUresult {
    status(|| {
        let context = current::current()?;
        ensure(!affinity.is_null() && kind == 0, CUDA_ERROR_INVALID_VALUE)?;
        // The affinity is all of the device's multiprocessors.
        let all = crate::attributes::value(16, context.device.ordinal as CUdevice).unwrap_or(0) as u32;
        // SAFETY: not null, so room for a kind and a number by the caller's promise.
        unsafe { affinity.cast::<[u32; 2]>().write_unaligned([kind, all]) };
        Ok(())
    })
}

/// Counts another user of the current context.
pub fn cuCtxAttach(out: Out<CUcontext>, flags: u32) -> CUresult {
    status(|| {
        ensure(!out.is_null() && flags == 0, CUDA_ERROR_INVALID_VALUE)?;
        current::current()?.attached.fetch_add(1, Ordering::Relaxed);
        out.put(current::handle())
    })
}

/// Takes a user from the current context; a context without users is destroyed.
pub fn cuCtxDetach(context: CUcontext) -> CUresult {
    let mut last = false;
    let result = status(|| {
        let current = current::current()?;
        ensure(current::handle() == context, CUDA_ERROR_INVALID_CONTEXT)?;
        let fewer = |users: u32| users.checked_sub(1);
        last = current.attached.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer).is_err();
        Ok(())
    });
    if last { cuCtxDestroy_v2(context) } else { result }
}

pub unsafe fn cuCtxCreate_v4(out: Out<CUcontext>, parameters: *mut c_void, flags: u32, dev: CUdevice) -> CUresult {
    // Execution affinities, their number, and an interop context: none is supported.
    // SAFETY: null, or three words by the caller's promise.
    if unsafe { read(parameters.cast::<[u64; 3]>()) }.is_ok_and(|it| it != [0; 3]) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    cuCtxCreate_v2(out, flags, dev)
}

pub fn cuCtxDestroy_v2(context: CUcontext) -> CUresult {
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

pub fn cuCtxDestroy(context: CUcontext) -> CUresult {
    cuCtxDestroy_v2(context)
}

pub fn cuCtxPushCurrent_v2(context: CUcontext) -> CUresult {
    status(|| {
        ensure(context != 0, CUDA_ERROR_INVALID_VALUE)?;
        current::ensure_known(context)?;
        current::push(context);
        Ok(())
    })
}

pub fn cuCtxPushCurrent(context: CUcontext) -> CUresult {
    cuCtxPushCurrent_v2(context)
}

pub fn cuCtxPopCurrent_v2(context: Out<CUcontext>) -> CUresult {
    status(|| {
        let popped = current::pop()?;
        context.put_if(popped);
        Ok(())
    })
}

pub fn cuCtxPopCurrent(context: Out<CUcontext>) -> CUresult {
    cuCtxPopCurrent_v2(context)
}

pub fn cuCtxSetCurrent(context: CUcontext) -> CUresult {
    status(|| {
        if context != 0 {
            current::ensure_known(context)?;
        }
        current::set(context);
        Ok(())
    })
}

pub fn cuCtxGetCurrent(context: Out<CUcontext>) -> CUresult {
    status(|| context.put(current::handle()))
}

pub fn cuCtxGetDevice(out: Out<CUdevice>) -> CUresult {
    cuCtxGetDevice_v2(out, 0)
}

pub fn cuCtxGetDevice_v2(out: Out<CUdevice>, context: CUcontext) -> CUresult {
    status(|| {
        let handle = if context == 0 { current::handle() } else { context };
        // A primary context has a device even while it is not active.
        let primary = devices().iter().find(|device| device.primary == handle);
        let ordinal = match primary {
            Some(device) => device.ordinal,
            None => current::or_named(context)?.device.ordinal,
        };
        out.put(ordinal as CUdevice)
    })
}

pub fn cuCtxGetId(context: CUcontext, id: Out<u64>) -> CUresult {
    status(|| {
        let named = if context == 0 { current::handle() } else { context };
        let known = current::or_named(context)?;
        id.put(handles::get::<Converted>(named).map_or(known.id, |it| it.0.id))
    })
}

pub fn cuCtxGetFlags(flags: Out<u32>) -> CUresult {
    status(|| flags.put(current::current()?.flags.load(Ordering::Relaxed)))
}

pub fn cuCtxSetFlags(flags: u32) -> CUresult {
    status(|| {
        check_flags(flags)?;
        current::current()?.flags.store(flags, Ordering::Relaxed);
        Ok(())
    })
}

pub fn cuCtxGetApiVersion(context: CUcontext, version: Out<u32>) -> CUresult {
    status(|| version.put(current::or_named(context)?.api_version.load(Ordering::Relaxed)))
}

pub fn cuCtxSynchronize() -> CUresult {
    status(|| {
        let context = current::current()?;
        synchronize(&context, current::green())
    })
}

pub fn cuCtxSynchronize_v2(context: CUcontext) -> CUresult {
    status(|| {
        let green = match context {
            0 => current::green(),
            context => handles::get::<Converted>(context).ok().map(|it| it.0.clone()),
        };
        synchronize(&*current::or_named(context)?, green)
    })
}

fn synchronize(context: &Context, green: Option<Arc<Green>>) -> Result<()> {
    // Streams of green contexts that capture do not stand in the way of a wait for the primary context.
    rekindle_graphs::hook::context_asked(green.as_ref().map_or(context.handle, |it| it.converted))?;
    green.map_or_else(|| context.synchronize(), |green| context.synchronize_group(green.id))
}

pub fn cuCtxGetLimit(value: Out<usize>, limit: u32) -> CUresult {
    status(|| value.put(current::healthy()?.limit(limit)?))
}

pub fn cuCtxSetLimit(limit: u32, value: usize) -> CUresult {
    status(|| current::healthy()?.set_limit(limit, value))
}

pub fn cuCtxGetCacheConfig(config: Out<u32>) -> CUresult {
    status(|| config.put(current::healthy()?.cache_config.load(Ordering::Relaxed)))
}

pub fn cuCtxSetCacheConfig(config: u32) -> CUresult {
    status(|| {
        ensure(config <= 3, CUDA_ERROR_INVALID_VALUE)?;
        current::healthy()?.cache_config.store(config, Ordering::Relaxed);
        Ok(())
    })
}

/// Shared memory's banks are four bytes wide on every current GPU.
pub fn cuCtxGetSharedMemConfig(config: Out<u32>) -> CUresult {
    status(|| {
        current::healthy()?;
        config.put(1)
    })
}

pub fn cuCtxSetSharedMemConfig(config: u32) -> CUresult {
    status(|| {
        current::healthy()?;
        ensure(config <= 2, CUDA_ERROR_INVALID_VALUE)
    })
}

/// The least and the greatest priority of streams.
pub(super) const PRIORITIES: [i32; 2] = [0, -5];

pub fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) -> CUresult {
    status(|| {
        current::current()?;
        least.put_if(PRIORITIES[0]);
        greatest.put_if(PRIORITIES[1]);
        Ok(())
    })
}

pub fn cuCtxResetPersistingL2Cache() -> CUresult {
    status(|| current::healthy().map(drop))
}

pub fn cuCtxEnablePeerAccess(peer: CUcontext, flags: u32) -> CUresult {
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

pub fn cuCtxDisablePeerAccess(peer: CUcontext) -> CUresult {
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

/// Lets a device access another device's allocations, or ends that.
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

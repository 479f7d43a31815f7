//! Contexts and each thread's stack of them.

use std::ffi::c_void;

use rekindle_cuda_abi::coredump;
use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{
    CONTEXT_CREATE, CONTEXT_DESTROY, CONTEXT_SYNC, EndContext, GREEN_CONTEXT_DESTROY, Kind, MakeContext, SyncContext,
};

use super::{check, code, put, put_if};
use crate::call::{Call, perform};
use crate::operations::{managed, pinned, variables};
use crate::state::client::{self, Client};
use crate::state::contexts::{self, Context, Contexts};
use crate::state::memory::Allocation;

/// Drops what the process knows of a context's objects. [`variables::forget_context`] says what the caller holds.
pub(super) fn forget(client: &Client, context: CUcontext) {
    rekindle_graphs::hook::context_gone(context);
    client.contexts.remove(context);
    client.coredumps.forget_context(context);
    client.streams.forget_context(context);
    client.events.forget_context(context);
    client.functions.forget_context(context);
    client.arrays.forget_context(context);
    super::ipc::close_all(client, context);
    managed::forget_context(client, context);
    variables::forget_context(client, context);
    for gone in client.memory.forget_context(context) {
        match gone {
            Allocation::Pinned { base, size, .. } => pinned::unmap(client, base, size),
            // Its area is gone already.
            Allocation::Managed { .. } => {}
            registered => super::register::take_back(client, &registered),
        }
    }
}

/// Destroys a green context, and forgets its streams. The primary context's count stays as it is.
pub(super) fn end_green(client: &'static Client, context: CUcontext) -> Result<(), CUresult> {
    rekindle_cuda_abi::private::cls_reset(context);
    let mut call = Call::unchecked(client, GREEN_CONTEXT_DESTROY, 0);
    call.put(&EndContext { context });
    check(call.wait().0)?;
    forget(client, context);
    Ok(())
}

/// Checks a context's flags: one way in which the CPU waits, and single bits.
pub(super) fn check_flags(flags: u32) -> Result<(), CUresult> {
    const SCHEDULING: u32 = 7;
    const ALL: u32 = 0xff;
    let known = flags & !ALL == 0 && matches!(flags & SCHEDULING, 0 | 1 | 2 | 4);
    if known { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

/// The flags of a context with which the worker makes it: without those for core dumps, which would abort the worker.
pub(super) fn for_worker(flags: u32) -> u32 {
    flags & !coredump::CONTEXT_FLAGS
}

/// The version of the interface that contexts of `cuCtxCreate` in its first form have.
const FIRST_VERSION: u32 = 3010;

/// The calls of CUDA before 3.2 are for contexts that were made in that form.
pub(super) fn in_first_form(client: &Client) -> Result<(), CUresult> {
    match client.contexts.current()?.1.api_version {
        FIRST_VERSION => Ok(()),
        _ => Err(CUDA_ERROR_INVALID_CONTEXT),
    }
}

fn create(pctx: *mut CUcontext, flags: u32, dev: CUdevice) -> Result<(), CUresult> {
    create_for(None, pctx, flags, dev)
}

/// Makes a context, for a version of the interface or that of the driver.
fn create_for(version: Option<u32>, pctx: *mut CUcontext, flags: u32, dev: CUdevice) -> Result<(), CUresult> {
    let client = client::get()?;
    let device = client.devices.number(dev)?;
    if pctx.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    check_flags(flags)?;
    let mut call = Call::new(CONTEXT_CREATE)?;
    let handle = client.fresh(Kind::Context);
    call.put(&MakeContext { context: handle, device: device as u64, flags: for_worker(flags) });
    let (result, mut reply) = call.wait();
    check(result)?;
    let drivers = reply.word().map_or(client.devices.api_version(), |word| word as u32);
    let api_version = version.unwrap_or(drivers);
    let id = handle & 0xffff_ffff | 1 << 32;
    client.contexts.insert(handle, Context { device, flags, api_version, id, green: None, attached: 0 });
    if !contexts::push(handle) {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    // SAFETY: not null, writable by cuda.h's contract.
    unsafe { put(pctx, handle) }
}

pub(crate) unsafe fn cuCtxCreate_v2(pctx: *mut CUcontext, flags: u32, dev: CUdevice) -> CUresult {
    code(create(pctx, flags, dev))
}

pub(crate) unsafe fn cuCtxCreate(pctx: *mut CUcontext, flags: u32, dev: CUdevice) -> CUresult {
    code(create_for(Some(FIRST_VERSION), pctx, flags, dev))
}

/// Execution affinities, which a device supports under MPS alone, and MPS is not used here.
pub(crate) unsafe fn cuCtxCreate_v3(
    pctx: *mut CUcontext,
    _params: *mut c_void,
    count: i32,
    flags: u32,
    dev: CUdevice,
) -> CUresult {
    if count != 0 {
        return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
    }
    code(create(pctx, flags, dev))
}

pub(crate) unsafe fn cuCtxCreate_v4(pctx: *mut CUcontext, params: *mut c_void, flags: u32, dev: CUdevice) -> CUresult {
    if !params.is_null() {
        // Affinities, their number, and how graphics share the context.
        // SAFETY: not null, so a CUctxCreateParams by the caller's promise.
        let [affinities, count, graphics] = unsafe { params.cast::<[u64; 3]>().read_unaligned() };
        if graphics != 0 {
            return CUDA_ERROR_NOT_SUPPORTED;
        }
        if affinities != 0 && count as u32 != 0 {
            return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
        }
    }
    code(create(pctx, flags, dev))
}

pub(crate) unsafe fn cuCtxGetExecAffinity(affinity: *mut c_void, kind: u32) -> CUresult {
    const SM_COUNT: u32 = 0;
    const MULTIPROCESSORS: i32 = 16;
    code(client::get().and_then(|client| {
        let (_, context) = client.contexts.current()?;
        if affinity.is_null() || kind != SM_COUNT {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let attributes = client.devices.get(context.device).map(|device| &device.attributes);
        let all = attributes.and_then(|list| list.iter().find(|a| a.0 == MULTIPROCESSORS)).map_or(0, |a| a.1);
        // A CUexecAffinityParam: its type, and of this type the number of multiprocessors.
        // SAFETY: not null, so writable by the caller's promise.
        unsafe { affinity.cast::<[u32; 2]>().write_unaligned([SM_COUNT, all as u32]) };
        Ok(())
    }))
}

/// Counts another user of the current context.
pub(crate) unsafe fn cuCtxAttach(pctx: *mut CUcontext, flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        if pctx.is_null() || flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let (handle, context) = client.contexts.current_itself()?;
        client.contexts.insert(handle, Context { attached: context.attached + 1, ..context });
        // SAFETY: not null, writable by cuda.h's contract.
        unsafe { put(pctx, handle) }
    }))
}

/// Takes a user from the current context; without any left it is destroyed.
pub(crate) unsafe fn cuCtxDetach(ctx: CUcontext) -> CUresult {
    let last = client::get().and_then(|client| {
        let (handle, context) = client.contexts.current_itself()?;
        if handle != ctx || context.attached == 0 && Contexts::is_primary(ctx) {
            return Err(CUDA_ERROR_INVALID_CONTEXT);
        }
        if context.attached > 0 {
            client.contexts.insert(handle, Context { attached: context.attached - 1, ..context });
        }
        Ok(context.attached == 0)
    });
    match last {
        // SAFETY: no pointers.
        Ok(true) => unsafe { cuCtxDestroy_v2(ctx) },
        Ok(false) => CUDA_SUCCESS,
        Err(error) => error,
    }
}

/// A context that there is; the driver takes null for a wrong value, not for a wrong context.
fn named_here(client: &Client, ctx: CUcontext) -> Result<Context, CUresult> {
    client.contexts.get(ctx).ok_or(if ctx == 0 { CUDA_ERROR_INVALID_VALUE } else { CUDA_ERROR_INVALID_CONTEXT })
}

pub(crate) unsafe fn cuCtxDestroy_v2(ctx: CUcontext) -> CUresult {
    code(client::get().and_then(|client| {
        // A green context ends by `cuGreenCtxDestroy`.
        if named_here(client, ctx)?.green.is_some() {
            return Err(CUDA_ERROR_INVALID_CONTEXT);
        }
        rekindle_cuda_abi::private::cls_reset(ctx);
        let _one = client.variables.change();
        let mut call = Call::unchecked(client, CONTEXT_DESTROY, 0);
        call.put(&EndContext { context: ctx });
        check(call.wait().0)?;
        forget(client, ctx);
        if contexts::current() == ctx {
            contexts::pop();
        }
        Ok(())
    }))
}

pub(crate) unsafe fn cuCtxDestroy(ctx: CUcontext) -> CUresult {
    // SAFETY: no pointers.
    unsafe { cuCtxDestroy_v2(ctx) }
}

pub(crate) unsafe fn cuCtxGetCurrent(pctx: *mut CUcontext) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(client::get().and_then(|_| unsafe { put(pctx, contexts::current()) }))
}

pub(crate) unsafe fn cuCtxSetCurrent(ctx: CUcontext) -> CUresult {
    code(client::get().and_then(|client| {
        // A primary context's handle may be made current before the context is retained, as the runtime does.
        if ctx != 0 && client.contexts.get(ctx).is_none() && !Contexts::is_primary(ctx) {
            return Err(CUDA_ERROR_INVALID_CONTEXT);
        }
        contexts::set_current(ctx);
        Ok(())
    }))
}

pub(crate) unsafe fn cuCtxPushCurrent_v2(ctx: CUcontext) -> CUresult {
    code(client::get().and_then(|client| {
        named_here(client, ctx)?;
        if contexts::push(ctx) { Ok(()) } else { Err(CUDA_ERROR_OUT_OF_MEMORY) }
    }))
}

pub(crate) unsafe fn cuCtxPushCurrent(ctx: CUcontext) -> CUresult {
    // SAFETY: no pointers.
    unsafe { cuCtxPushCurrent_v2(ctx) }
}

pub(crate) unsafe fn cuCtxPopCurrent_v2(pctx: *mut CUcontext) -> CUresult {
    code(client::get().and_then(|_| {
        let context = contexts::pop().ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put_if(pctx, context) };
        Ok(())
    }))
}

pub(crate) unsafe fn cuCtxPopCurrent(pctx: *mut CUcontext) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuCtxPopCurrent_v2(pctx) }
}

/// The context that a parameter names, 0 meaning the current one.
fn named(ctx: CUcontext) -> Result<(&'static Client, Context), CUresult> {
    let client = client::get()?;
    let context = if ctx == 0 {
        client.contexts.current()?.1
    } else {
        client.contexts.get(ctx).ok_or(CUDA_ERROR_INVALID_CONTEXT)?
    };
    Ok((client, context))
}

pub(crate) unsafe fn cuCtxGetDevice_v2(device: *mut CUdevice, ctx: CUcontext) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(named(ctx).and_then(|(client, c)| unsafe { put(device, client.devices.ordinal(c.device)) }))
}

pub(crate) unsafe fn cuCtxGetDevice(device: *mut CUdevice) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuCtxGetDevice_v2(device, 0) }
}

pub(crate) unsafe fn cuCtxGetFlags(flags: *mut u32) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(named(0).and_then(|(_, c)| unsafe { put(flags, c.flags) }))
}

pub(crate) unsafe fn cuCtxSetFlags(flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        let (handle, context) = client.contexts.current_itself()?;
        check_flags(flags)?;
        client.contexts.insert(handle, Context { flags, ..context });
        Ok(())
    }))
}

/// `cuCtxGetId`.
pub(crate) fn context_id(ctx: CUcontext) -> Result<u64, CUresult> {
    named(ctx).map(|(_, c)| c.id)
}

pub(crate) unsafe fn cuCtxGetId(ctx: CUcontext, id: *mut u64) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(context_id(ctx).and_then(|c| unsafe { put(id, c) }))
}

pub(crate) unsafe fn cuCtxGetApiVersion(ctx: CUcontext, version: *mut u32) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(named(ctx).and_then(|(_, c)| unsafe { put(version, c.api_version) }))
}

pub(crate) unsafe fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) -> CUresult {
    code(named(0).map(|(client, c)| {
        let (l, g) = client.devices.get(c.device).map_or((0, 0), |device| device.stream_priorities);
        // SAFETY: the caller's promise by cuda.h.
        unsafe {
            put_if(least, l);
            put_if(greatest, g);
        }
    }))
}

fn synchronize(ctx: CUcontext) -> Result<(), CUresult> {
    let client = client::get()?;
    let handle = if ctx == 0 { client.contexts.current_itself()?.0 } else { ctx };
    client.contexts.get(handle).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    // Streams of green contexts that capture do not stand in the way (driver 580).
    rekindle_graphs::hook::context_asked(handle)?;
    // Who waits for a primary context waits for its green contexts, too.
    let mut all = client.contexts.green_contexts(handle).into_iter().chain([handle]);
    all.try_for_each(|context| perform(CONTEXT_SYNC, &SyncContext { context }))
}

pub(crate) unsafe fn cuCtxSynchronize() -> CUresult {
    code(synchronize(0))
}

pub(crate) unsafe fn cuCtxSynchronize_v2(ctx: CUcontext) -> CUresult {
    code(synchronize(ctx))
}

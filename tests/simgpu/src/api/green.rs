//! Green contexts, what they are made of, and events of whole contexts.

use std::sync::Arc;

use rekindle_cuda_abi::arguments::{In, Out};
use rekindle_cuda_abi::types::*;
use rekindle_graphs::hook;

use super::context::PRIORITIES;
use crate::context::Context;
use crate::contexts;
use crate::device::device;
use crate::event::Event;
use crate::green::{Converted, Green, Processors};
use crate::order::Role;
use crate::status::{Result, check, ensure, put, status, values};
use crate::{current, handles, streams};

const NON_BLOCKING: u32 = 1;

fn put_resource(out: Out<CUdevResource>, kind: u32, processors: impl FnOnce() -> Result<Processors>) -> Result<()> {
    out.require()?;
    ensure(kind == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE)?;
    out.put(processors()?.to_program())
}

/// A green context that a program names.
fn named(green: CUgreenCtx) -> Result<Arc<Green>> {
    handles::get(green).map_err(|_| CUDA_ERROR_INVALID_CONTEXT)
}

/// A context that a program names, and the green context that it was converted from.
fn named_context(context: CUcontext) -> Result<(Arc<Context>, Option<Arc<Green>>)> {
    let green = handles::get::<Converted>(context).ok().map(|it| it.0.clone());
    Ok((current::named(context).map_err(|_| CUDA_ERROR_INVALID_CONTEXT)?, green))
}

pub fn cuDeviceGetDevResource(dev: CUdevice, out: Out<CUdevResource>, kind: u32) -> CUresult {
    status(|| {
        let device = device(dev)?;
        put_resource(out, kind, || Processors::all(device))
    })
}

pub fn cuCtxGetDevResource(context: CUcontext, out: Out<CUdevResource>, kind: u32) -> CUresult {
    status(|| {
        let (context, green) = named_context(context)?;
        put_resource(out, kind, || green.map_or_else(|| Processors::all(context.device), |it| Ok(it.processors)))
    })
}

pub fn cuGreenCtxGetDevResource(green: CUgreenCtx, out: Out<CUdevResource>, kind: u32) -> CUresult {
    status(|| {
        let green = named(green)?;
        put_resource(out, kind, || Ok(green.processors))
    })
}

pub unsafe fn cuDevSmResourceSplitByCount(
    result: *mut CUdevResource,
    groups: *mut u32,
    input: In<CUdevResource>,
    remaining: Out<CUdevResource>,
    flags: u32,
    least: u32,
) -> CUresult {
    status(|| {
        // SAFETY: null, or a number by the caller's promise.
        let room = unsafe { crate::status::read(groups) }?;
        let whole = Processors::of_program(&*input.read()?)?;
        let most = if result.is_null() { None } else { Some(room) };
        ensure(most != Some(0), CUDA_ERROR_INVALID_VALUE)?;
        let (parts, rest) = whole.split(most, flags, least)?;
        if !result.is_null() {
            for (place, part) in parts.iter().enumerate() {
                // SAFETY: the array has room for as many as `groups` says, by the caller's promise.
                unsafe { put(result.add(place), part.to_program()) }?;
            }
            remaining.put_if(rest.to_program());
        }
        // SAFETY: as above.
        unsafe { put(groups, parts.len() as u32) }
    })
}

pub unsafe fn cuDevResourceGenerateDesc(out: Out<u64>, resources: *mut CUdevResource, count: u32) -> CUresult {
    status(|| {
        out.require()?;
        // SAFETY: null, or as many as the caller says.
        let resources = unsafe { values(resources, count as usize) }?;
        let parts = resources.iter().map(Processors::of_program).collect::<Result<Vec<_>>>()?;
        let descriptor = handles::next();
        handles::insert(descriptor, Arc::new(Processors::together(&parts)?));
        out.put(descriptor)
    })
}

pub fn cuGreenCtxCreate(out: Out<CUgreenCtx>, descriptor: u64, dev: CUdevice, flags: u32) -> CUresult {
    status(|| {
        let device = device(dev)?;
        out.require()?;
        ensure(flags == CU_GREEN_CTX_DEFAULT_STREAM, CUDA_ERROR_INVALID_VALUE)?;
        let processors = handles::get::<Processors>(descriptor).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        ensure(processors.device == device.ordinal as u32, CUDA_ERROR_INVALID_VALUE)?;
        let context = contexts::retain(device)?;
        out.put(Green::create(&context, *processors).handle)
    })
}

pub fn cuGreenCtxDestroy(green: CUgreenCtx) -> CUresult {
    status(|| {
        let green = named(green)?;
        let context = green.context()?;
        hook::context_gone(green.converted);
        rekindle_cuda_abi::private::cls_reset(green.converted);
        let _ = context.synchronize_group(green.id);
        green.end();
        current::forget(green.converted);
        check(super::cuDevicePrimaryCtxRelease_v2(context.device.ordinal as CUdevice))
    })
}

pub fn cuCtxFromGreenCtx(out: Out<CUcontext>, green: CUgreenCtx) -> CUresult {
    status(|| out.put(named(green)?.converted))
}

pub fn cuGreenCtxGetId(green: CUgreenCtx, id: Out<u64>) -> CUresult {
    status(|| {
        let green = if green == 0 { current::green() } else { Some(named(green)?) };
        id.put(green.ok_or(CUDA_ERROR_INVALID_CONTEXT)?.id)
    })
}

pub fn cuGreenCtxStreamCreate(out: Out<CUstream>, green: CUgreenCtx, flags: u32, priority: i32) -> CUresult {
    status(|| {
        let green = named(green)?;
        out.require()?;
        ensure(flags == NON_BLOCKING, CUDA_ERROR_INVALID_VALUE)?;
        let context = green.context()?;
        context.check()?;
        let priority = priority.clamp(PRIORITIES[1], PRIORITIES[0]);
        out.put(streams::create(&context, Role::NonBlocking, priority, Some(green))?)
    })
}

fn record(context: &Arc<Context>, green: Option<&Green>, event: CUevent) -> Result<()> {
    context.check()?;
    let known = handles::get::<Event>(event)?;
    let home = known.context.upgrade().ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    ensure(home.id == context.id, CUDA_ERROR_INVALID_HANDLE)?;
    hook::record_in_context(event, green.map_or(context.handle, |it| it.converted))?;
    streams::record(context, green.map(|it| it.id), &known)
}

fn wait(context: &Arc<Context>, green: Option<&Green>, event: CUevent) -> Result<()> {
    context.check()?;
    let known = handles::get::<Event>(event)?;
    hook::wait_in_context(green.map_or(context.handle, |it| it.converted), event)?;
    known.mark().map_or(Ok(()), |mark| streams::hold(context, green.map(|it| it.id), &mark))
}

pub fn cuCtxRecordEvent(context: CUcontext, event: CUevent) -> CUresult {
    status(|| named_context(context).and_then(|(context, green)| record(&context, green.as_deref(), event)))
}

pub fn cuCtxWaitEvent(context: CUcontext, event: CUevent) -> CUresult {
    status(|| named_context(context).and_then(|(context, green)| wait(&context, green.as_deref(), event)))
}

pub fn cuGreenCtxRecordEvent(green: CUgreenCtx, event: CUevent) -> CUresult {
    status(|| named(green).and_then(|green| record(&green.context()?, Some(&green), event)))
}

pub fn cuGreenCtxWaitEvent(green: CUgreenCtx, event: CUevent) -> CUresult {
    status(|| named(green).and_then(|green| wait(&green.context()?, Some(&green), event)))
}

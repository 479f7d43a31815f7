//! Green contexts, what they are made of, and events of whole contexts.

use std::collections::hash_map::Entry;

use rekindle_cuda_abi::raw::{read, values};
use rekindle_cuda_abi::types::*;
use rekindle_graphs::hook;
use rekindle_wire::command::{
    CONTEXT_RECORD, CONTEXT_WAIT, ContextEvent, GREEN_CONTEXT_CREATE, Kind, MakeGreenContext, RESOURCE_DESCRIBE,
    RESOURCE_OF_CONTEXT, RESOURCE_OF_DEVICE, RESOURCE_SPLIT, ResourceDescribe, ResourceOfContext, ResourceOfDevice,
    ResourceSplit,
};

use super::context::end_green;
use super::{check, code, put};
use crate::call::{Call, perform};
use crate::connection::command::Reply;
use crate::process::log;
use crate::state::client::{self, Client};
use crate::state::contexts::{self, Context, Green, within};
use crate::state::green::{Origin, Parts, Resource, Split};

/// The most parts of a resource that a program can ask for. No device has as many multiprocessors.
const MOST_PARTS: u32 = 512;

const NON_BLOCKING: u32 = 1;

/// The context that a green context is converted into: it has the same number.
fn converted(green: CUgreenCtx) -> CUcontext {
    if Kind::GreenContext.owns(green) { Kind::Context.handle(green) } else { 0 }
}

/// A green context that a program names, and the context that it is converted into.
fn named(client: &Client, green: CUgreenCtx) -> Result<(CUcontext, Context, Green), CUresult> {
    let handle = converted(green);
    let context = client.contexts.get(handle).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    Ok((handle, context, context.green.ok_or(CUDA_ERROR_INVALID_CONTEXT)?))
}

/// Takes what a reply says of a resource.
fn told(reply: &mut Reply, handle: u64) -> Result<Resource, CUresult> {
    let mut word = || reply.word().map(|word| word as u32).ok_or(CUDA_ERROR_UNKNOWN);
    Ok(Resource { handle, processors: CUdevSmResource { count: word()?, smallest_part: word()?, alignment: word()? } })
}

/// The resource that comes from there.
fn resource(client: &Client, origin: Origin) -> Result<Resource, CUresult> {
    let mut known = client.resources.known();
    match known.origins.entry(origin) {
        Entry::Occupied(known) => Ok(*known.get()),
        Entry::Vacant(new) => {
            let handle = client.fresh(Kind::Resource);
            let (result, mut reply) = match origin {
                Origin::Device(device) => {
                    let mut call = Call::new(RESOURCE_OF_DEVICE)?;
                    call.put(&ResourceOfDevice { resource: handle, device: device as u64, expected: 0 });
                    call.wait()
                }
                Origin::Descriptor(device, descriptor) => {
                    let mut call = Call::new(RESOURCE_OF_CONTEXT)?;
                    let device = device as u64;
                    call.put(&ResourceOfContext { resource: handle, descriptor, device, expected: 0 });
                    call.wait()
                }
            };
            check(result)?;
            Ok(*new.insert(told(&mut reply, handle)?))
        }
    }
}

/// Writes a resource of the type that the caller asks for.
///
/// # Safety
/// `out` is null or writable.
unsafe fn put_resource(
    out: *mut CUdevResource,
    kind: u32,
    resource: impl FnOnce() -> Result<Resource, CUresult>,
) -> Result<(), CUresult> {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if kind != CU_DEV_RESOURCE_TYPE_SM {
        return Err(CUDA_ERROR_INVALID_RESOURCE_TYPE);
    }
    // SAFETY: not null, writable by the caller's promise.
    unsafe { put(out, resource()?.to_program()) }
}

/// The resources of a context: those that its green context is made of, or all of its device's.
fn origin(context: &Context) -> Origin {
    match context.green {
        Some(green) => Origin::Descriptor(context.device, green.descriptor),
        None => Origin::Device(context.device),
    }
}

pub(crate) unsafe fn cuDeviceGetDevResource(device: CUdevice, out: *mut CUdevResource, kind: u32) -> CUresult {
    code(client::get().and_then(|client| {
        let device = client.devices.number(device)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put_resource(out, kind, || resource(client, Origin::Device(device))) }
    }))
}

pub(crate) unsafe fn cuCtxGetDevResource(context: CUcontext, out: *mut CUdevResource, kind: u32) -> CUresult {
    code(client::get().and_then(|client| {
        let context = client.contexts.get(context).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put_resource(out, kind, || resource(client, origin(&context))) }
    }))
}

pub(crate) unsafe fn cuGreenCtxGetDevResource(green: CUgreenCtx, out: *mut CUdevResource, kind: u32) -> CUresult {
    code(client::get().and_then(|client| {
        let (_, context, _) = named(client, green)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put_resource(out, kind, || resource(client, origin(&context))) }
    }))
}

/// Splits a resource, or counts the parts that there would be.
fn split(client: &Client, wanted: Split) -> Result<Parts, CUresult> {
    let mut known = client.resources.known();
    let new = match known.splits.entry(wanted) {
        Entry::Occupied(known) => return Ok(known.get().clone()),
        Entry::Vacant(new) => new,
    };
    let parts: Vec<u64> = (0..wanted.room).map(|_| client.fresh(Kind::Resource)).collect();
    let rest = client.fresh(Kind::Resource);
    let mut call = Call::new(RESOURCE_SPLIT)?;
    let Split { resource, flags, least, .. } = wanted;
    call.put(&ResourceSplit { resource, flags, least, rest, parts: parts.clone(), expected: Vec::new() });
    let (result, mut reply) = call.wait();
    check(result)?;
    let count = reply.word().ok_or(CUDA_ERROR_UNKNOWN)? as usize;
    let parts = parts.into_iter().take(count).map(|handle| told(&mut reply, handle)).collect::<Result<_, _>>()?;
    let rest = told(&mut reply, rest)?;
    Ok(new.insert(Parts { parts, rest }).clone())
}

/// The number of parts that a split would make.
fn count_parts(resource: u64, flags: u32, least: u32) -> Result<u32, CUresult> {
    let mut call = Call::new(RESOURCE_SPLIT)?;
    call.put(&ResourceSplit { resource, flags, least, rest: 0, parts: Vec::new(), expected: Vec::new() });
    let (result, mut reply) = call.wait();
    check(result)?;
    reply.word().map(|word| word as u32).ok_or(CUDA_ERROR_UNKNOWN)
}

/// A program that asks for the same split twice gets the same parts twice. The driver takes them for different ones, and makes
/// no descriptor of some of both.
pub(crate) unsafe fn cuDevSmResourceSplitByCount(
    result: *mut CUdevResource,
    groups: *mut u32,
    input: *const CUdevResource,
    remaining: *mut CUdevResource,
    flags: u32,
    least: u32,
) -> CUresult {
    code(client::get().and_then(|client| {
        // SAFETY: the caller's promise by cuda.h.
        let (room, input) = unsafe { (read(groups)?, read(input)?) };
        let resource = Resource::named_by(&input)?;
        if result.is_null() {
            // SAFETY: as above.
            return unsafe { put(groups, count_parts(resource, flags, least)?) };
        }
        if room == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let made = split(client, Split { resource, flags, least, room: room.min(MOST_PARTS) })?;
        for (place, part) in made.parts.iter().enumerate() {
            // SAFETY: the array has room for as many, by the caller's promise.
            unsafe { put(result.add(place), part.to_program())? };
        }
        // SAFETY: as above; the rest may be unwanted.
        unsafe {
            super::put_if(remaining, made.rest.to_program());
            put(groups, made.parts.len() as u32)
        }
    }))
}

pub(crate) unsafe fn cuDevResourceGenerateDesc(out: *mut u64, resources: *mut CUdevResource, count: u32) -> CUresult {
    code(client::get().and_then(|client| {
        if out.is_null() || count == 0 || count > MOST_PARTS {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller's promise by cuda.h.
        let resources = unsafe { values(resources, count as usize)? };
        let resources = resources.iter().map(Resource::named_by).collect::<Result<Vec<u64>, _>>()?;
        let mut known = client.resources.known();
        let descriptor = match known.descriptors.entry(resources) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                let descriptor = client.fresh(Kind::ResourceDescriptor);
                perform(RESOURCE_DESCRIBE, &ResourceDescribe { descriptor, resources: new.key().clone() })?;
                *new.insert(descriptor)
            }
        };
        // SAFETY: not null, writable by the caller's promise.
        unsafe { put(out, descriptor) }
    }))
}

/// Retains the primary context, as long as the green one lives.
pub(crate) unsafe fn cuGreenCtxCreate(out: *mut CUgreenCtx, descriptor: u64, dev: CUdevice, flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        let device = client.devices.number(dev)?;
        if out.is_null() || flags != CU_GREEN_CTX_DEFAULT_STREAM || !Kind::ResourceDescriptor.owns(descriptor) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut primary = 0;
        // SAFETY: the out parameter is a local.
        check(unsafe { super::cuDevicePrimaryCtxRetain(&raw mut primary, dev) })?;
        let handle = client.fresh(Kind::Context);
        let made = make(client, handle, MakeGreenContext { context: handle, primary, descriptor, flags }, device);
        if made.is_err() {
            // SAFETY: no pointers.
            unsafe { super::cuDevicePrimaryCtxRelease_v2(dev) };
        }
        made?;
        // SAFETY: not null, writable by the caller's promise.
        unsafe { put(out, Kind::GreenContext.handle(handle)) }
    }))
}

fn make(client: &Client, handle: CUcontext, wanted: MakeGreenContext, device: usize) -> Result<(), CUresult> {
    let primary = client.contexts.get(wanted.primary).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    perform(GREEN_CONTEXT_CREATE, &wanted)?;
    let id = handle & 0xffff_ffff | 1 << 32;
    let green = Some(Green { primary: wanted.primary, descriptor: wanted.descriptor });
    client.contexts.insert(handle, Context { device, id, green, attached: 0, ..primary });
    Ok(())
}

pub(crate) unsafe fn cuGreenCtxDestroy(green: CUgreenCtx) -> CUresult {
    code(client::get().and_then(|client| {
        let (handle, context, _) = named(client, green)?;
        end_green(client, handle)?;
        // SAFETY: no pointers.
        check(unsafe { super::cuDevicePrimaryCtxRelease_v2(client.devices.ordinal(context.device)) })
    }))
}

pub(crate) unsafe fn cuCtxFromGreenCtx(out: *mut CUcontext, green: CUgreenCtx) -> CUresult {
    code(client::get().and_then(|client| {
        let (handle, _, _) = named(client, green)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(out, handle) }
    }))
}

pub(crate) unsafe fn cuGreenCtxGetId(green: CUgreenCtx, id: *mut u64) -> CUresult {
    code(client::get().and_then(|client| {
        let context = match green {
            // The current one, which must be green.
            0 => client.contexts.get(contexts::current()).filter(|it| it.green.is_some()),
            green => named(client, green).map(|(_, context, _)| context).ok(),
        };
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(id, context.ok_or(CUDA_ERROR_INVALID_CONTEXT)?.id) }
    }))
}

/// The stream is what `cuStreamCreateWithPriority` makes where the green context is current.
pub(crate) unsafe fn cuGreenCtxStreamCreate(
    stream: *mut CUstream,
    green: CUgreenCtx,
    flags: u32,
    priority: i32,
) -> CUresult {
    code(client::get().and_then(|client| {
        let (handle, _, _) = named(client, green)?;
        if flags != NON_BLOCKING {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller's promise by cuda.h.
        within(handle, || check(unsafe { super::cuStreamCreateWithPriority(stream, flags, priority) }))
    }))
}

/// Checks a context and an event, which must be this process's alone: others learn of records in streams only.
fn check_both(client: &Client, context: CUcontext, event: CUevent) -> Result<(), CUresult> {
    client.contexts.get(context).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    client.events.context(event).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    if client.events.is_shared(event) {
        log::refused("an event of several processes for a whole context");
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    Ok(())
}

// Streams of green contexts that capture stand in the way of an event of their own context, and not in that of the primary context's
// (driver 580; cuda.h says that they do).

fn record(context: CUcontext, event: CUevent) -> Result<(), CUresult> {
    let client = client::get()?;
    check_both(client, context, event)?;
    if client.events.context(event) != Some(client.contexts.owner(context)) {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    hook::record_in_context(event, context)?;
    client.events.record(event);
    perform(CONTEXT_RECORD, &ContextEvent { context, event })
}

fn wait(context: CUcontext, event: CUevent) -> Result<(), CUresult> {
    let client = client::get()?;
    check_both(client, context, event)?;
    hook::wait_in_context(context, event)?;
    perform(CONTEXT_WAIT, &ContextEvent { context, event })
}

pub(crate) unsafe fn cuCtxRecordEvent(context: CUcontext, event: CUevent) -> CUresult {
    code(record(context, event))
}

pub(crate) unsafe fn cuCtxWaitEvent(context: CUcontext, event: CUevent) -> CUresult {
    code(wait(context, event))
}

pub(crate) unsafe fn cuGreenCtxRecordEvent(green: CUgreenCtx, event: CUevent) -> CUresult {
    code(client::get().and_then(|client| record(named(client, green)?.0, event)))
}

pub(crate) unsafe fn cuGreenCtxWaitEvent(green: CUgreenCtx, event: CUevent) -> CUresult {
    code(client::get().and_then(|client| wait(named(client, green)?.0, event)))
}

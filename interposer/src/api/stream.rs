//! Streams.

use rekindle_cuda_abi::types::*;
use rekindle_graphs::hook;
use rekindle_wire::command::{OfStream, STREAM_DESTROY};

use super::{check, code, put, put_if};
use crate::call::{Call, remote, standing_error};
use crate::operations::event;
use crate::operations::stream::{context_of, named, synchronize};
use crate::process::calling_thread::named_stream;
use crate::state::client;
use crate::state::contexts;
use crate::state::idle;
use crate::state::streams::Stream;

fn remember(handle: CUstream, flags: u32, priority: i32) -> Result<(), CUresult> {
    let client = client::get()?;
    // Ids 1 and 2 are the default streams'; a handle's number is unique in the process.
    let id = (handle & 0xffff_ffff_ffff) + 2;
    client.streams.insert(handle, Stream { context: contexts::current(), flags, priority, id });
    Ok(())
}

pub(crate) unsafe fn cuStreamCreate(stream: *mut CUstream, flags: u32) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuStreamCreateWithPriority(stream, flags, 0) }
}

pub(crate) unsafe fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: u32, priority: i32) -> CUresult {
    code(client::get().and_then(|client| {
        let (_, context) = client.contexts.current()?;
        if flags > 1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // The driver clamps.
        let (least, greatest) = client.devices.get(context.device).map_or((0, 0), |device| device.stream_priorities);
        let priority = priority.clamp(greatest.min(least), least.max(greatest));
        // SAFETY: the caller's promise by cuda.h; on success the encoder has written the handle.
        unsafe {
            check(remote::cuStreamCreateWithPriority(stream, flags, priority))?;
            remember(*stream, flags, priority)
        }
    }))
}

pub(crate) unsafe fn cuStreamDestroy_v2(stream: CUstream) -> CUresult {
    code(client::get().and_then(|client| {
        let mut call = Call::new(STREAM_DESTROY)?;
        hook::stream_destroyed(stream);
        if !client.streams.remove(stream) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        call.put(&OfStream { stream });
        check(call.send())
    }))
}

pub(crate) unsafe fn cuStreamDestroy(stream: CUstream) -> CUresult {
    // SAFETY: no pointers.
    unsafe { cuStreamDestroy_v2(stream) }
}

/// `cuStreamGetId`: unique for each stream of a context.
pub(crate) fn stream_id(_context: CUcontext, stream: CUstream) -> Result<u64, CUresult> {
    named(stream).map(|s| s.id)
}

pub(crate) unsafe fn cuStreamGetId(stream: CUstream, id: *mut u64) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(context_of(stream).and_then(|_| unsafe { put(id, named(stream)?.id) }))
}

pub(crate) unsafe fn cuStreamGetFlags(stream: CUstream, flags: *mut u32) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(named(stream).and_then(|s| unsafe { put(flags, s.flags) }))
}

pub(crate) unsafe fn cuStreamGetPriority(stream: CUstream, priority: *mut i32) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(named(stream).and_then(|s| unsafe { put(priority, s.priority) }))
}

pub(crate) unsafe fn cuStreamGetCtx(stream: CUstream, pctx: *mut CUcontext) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(context_of(stream).and_then(|context| unsafe { put(pctx, context) }))
}

/// A stream of a green context belongs to its primary context, too.
pub(crate) unsafe fn cuStreamGetCtx_v2(stream: CUstream, pctx: *mut CUcontext, out: *mut CUgreenCtx) -> CUresult {
    code(context_of(stream).and_then(|context| {
        let client = client::get()?;
        let green = client.contexts.green(context);
        if green != 0 && named_stream(stream) == CU_STREAM_PER_THREAD {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        // SAFETY: the caller's promise by cuda.h.
        unsafe {
            put(pctx, client.contexts.owner(context))?;
            put_if(out, green);
        }
        Ok(())
    }))
}

pub(crate) unsafe fn cuStreamGetGreenCtx(stream: CUstream, out: *mut CUgreenCtx) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(context_of(stream).and_then(|context| unsafe { put(out, client::get()?.contexts.green(context)) }))
}

pub(crate) unsafe fn cuStreamGetDevice(stream: CUstream, device: *mut CUdevice) -> CUresult {
    code(named(stream).and_then(|s| {
        let client = client::get()?;
        let context = client.contexts.get(s.context).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(device, client.devices.ordinal(context.device)) }
    }))
}

pub(crate) unsafe fn cuStreamSynchronize(stream: CUstream) -> CUresult {
    code(hook::stream_asked(stream).and_then(|()| synchronize(stream)))
}

pub(crate) unsafe fn cuStreamQuery(stream: CUstream) -> CUresult {
    // SAFETY: no pointers.
    code(hook::stream_asked(stream).and_then(|()| {
        let client = client::get()?;
        if idle::is_idle(&client.connection, stream) {
            return standing_error(client);
        }
        // SAFETY: no pointers.
        check(unsafe { remote::cuStreamQuery(stream) })
    }))
}

pub(crate) unsafe fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32) -> CUresult {
    code(event::wait(event, stream, flags))
}

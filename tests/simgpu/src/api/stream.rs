//! Streams, and host functions in them.

use std::ffi::c_void;

use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUcontext, CUdevice,
    CUevent, CUresult, CUstream,
};

use rekindle_graphs::hook;

use super::context::PRIORITIES;
use crate::event::Event;
use crate::order::Role;
use crate::status::{ensure, put, put_if, status};
use crate::streams;
use crate::{current, handles};

const NON_BLOCKING: u32 = 1;

pub unsafe fn cuStreamCreate(out: *mut CUstream, flags: u32) -> CUresult {
    unsafe { cuStreamCreateWithPriority(out, flags, 0) }
}

/// A priority outside the range is taken as the nearest inside. It has no effect here.
pub unsafe fn cuStreamCreateWithPriority(out: *mut CUstream, flags: u32, priority: i32) -> CUresult {
    status(|| {
        ensure(flags & !NON_BLOCKING == 0 && !out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let role = if flags & NON_BLOCKING == 0 { Role::Blocking } else { Role::NonBlocking };
        let priority = priority.clamp(PRIORITIES[1], PRIORITIES[0]);
        unsafe { put(out, streams::create(&current::healthy()?, role, priority)?) }
    })
}

pub unsafe fn cuStreamDestroy_v2(stream: CUstream) -> CUresult {
    status(|| {
        ensure(stream > 2, CUDA_ERROR_INVALID_HANDLE)?;
        hook::stream_destroyed(stream);
        let stream = current::stream(stream)?;
        streams::destroy(&stream)?;
        Ok(())
    })
}

pub unsafe fn cuStreamDestroy(stream: CUstream) -> CUresult {
    unsafe { cuStreamDestroy_v2(stream) }
}

pub unsafe fn cuStreamQuery(stream: CUstream) -> CUresult {
    status(|| {
        hook::stream_asked(stream)?;
        let stream = current::stream(stream)?;
        stream.context()?.check()?;
        ensure(stream.is_idle()?, CUDA_ERROR_NOT_READY)
    })
}

pub unsafe fn cuStreamSynchronize(stream: CUstream) -> CUresult {
    status(|| {
        hook::stream_asked(stream)?;
        current::stream(stream)?.synchronize()
    })
}

pub unsafe fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32) -> CUresult {
    status(|| {
        let known = handles::get::<Event>(event)?;
        let on = current::stream(stream)?;
        if let Some(code) = hook::wait(stream, event, flags, || known.mark().is_some()) {
            return ensure(code == CUDA_SUCCESS, code);
        }
        let stream = on;
        if let Some(last) = known.shared().and_then(|shared| shared.last()).filter(|last| !last.is_done()) {
            let waits = move |_: &_| {
                last.wait();
                Ok(())
            };
            return stream.submit(waits).map(drop);
        }
        match known.mark() {
            Some(mark) if !mark.reached() => stream.hold(mark),
            _ => Ok(()),
        }
    })
}

type HostFunction = unsafe extern "C" fn(*mut c_void);
type Callback = unsafe extern "C" fn(CUstream, CUresult, *mut c_void);

/// What a callback is called with: a number to us, whatever it points to.
fn opaque(pointer: *mut c_void) -> usize {
    pointer as usize
}

pub unsafe fn cuLaunchHostFunc(stream: CUstream, function: *mut c_void, data: *mut c_void) -> CUresult {
    status(|| {
        ensure(!function.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        if let Some(code) = hook::host(stream, function as u64, data as u64) {
            return ensure(code == CUDA_SUCCESS, code);
        }
        let function = unsafe { std::mem::transmute::<*mut c_void, HostFunction>(function) };
        let data = opaque(data);
        current::stream(stream)?.submit(move |context| {
            context.flush_prints();
            unsafe { function(data as *mut c_void) };
            Ok(())
        })?;
        Ok(())
    })
}

/// Unlike a host function, a callback is also called when the context has failed, and told so.
pub unsafe fn cuStreamAddCallback(stream: CUstream, callback: *mut c_void, data: *mut c_void, flags: u32) -> CUresult {
    status(|| {
        ensure(!callback.is_null() && flags == 0, CUDA_ERROR_INVALID_VALUE)?;
        hook::not_capturable(stream)?;
        let callback = unsafe { std::mem::transmute::<*mut c_void, Callback>(callback) };
        let data = opaque(data);
        current::stream(stream)?.submit_always(move |context, state| {
            context.flush_prints();
            unsafe { callback(stream, state.err().unwrap_or(CUDA_SUCCESS), data as *mut c_void) };
            state
        })?;
        Ok(())
    })
}

pub unsafe fn cuStreamGetPriority(stream: CUstream, priority: *mut i32) -> CUresult {
    status(|| unsafe { put(priority, current::stream(stream)?.priority) })
}

pub unsafe fn cuStreamGetFlags(stream: CUstream, flags: *mut u32) -> CUresult {
    status(|| {
        let stream = current::stream(stream)?;
        unsafe { put(flags, if stream.role() == Role::NonBlocking { NON_BLOCKING } else { 0 }) }
    })
}

pub unsafe fn cuStreamGetId(stream: CUstream, id: *mut u64) -> CUresult {
    status(|| unsafe { put(id, current::stream(stream)?.id) })
}

pub unsafe fn cuStreamGetDevice(stream: CUstream, device: *mut CUdevice) -> CUresult {
    status(|| unsafe { put(device, current::stream(stream)?.context()?.device.ordinal as CUdevice) })
}

pub unsafe fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext) -> CUresult {
    status(|| unsafe { put(context, current::stream(stream)?.context()?.handle) })
}

pub unsafe fn cuStreamGetCtx_v2(stream: CUstream, context: *mut CUcontext, green: *mut c_void) -> CUresult {
    status(|| unsafe {
        put(context, current::stream(stream)?.context()?.handle)?;
        put_if(green.cast::<u64>(), 0);
        Ok(())
    })
}

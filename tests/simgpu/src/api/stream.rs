//! Streams, and host functions in them.

use std::ffi::c_void;

use rekindle_cuda_abi::arguments::Out;
use rekindle_cuda_abi::types::{
    CU_STREAM_PER_THREAD, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_READY, CUDA_SUCCESS,
    CUcontext, CUdevice, CUevent, CUresult, CUstream,
};

use rekindle_graphs::hook;

use super::context::PRIORITIES;
use crate::event::Event;
use crate::order::Role;
use crate::status::{ensure, status};
use crate::streams;
use crate::{current, handles};

const NON_BLOCKING: u32 = 1;

pub fn cuStreamCreate(out: Out<CUstream>, flags: u32) -> CUresult {
    cuStreamCreateWithPriority(out, flags, 0)
}

/// A priority outside the range counts as the nearest one inside. Priorities have no effect here.
pub fn cuStreamCreateWithPriority(out: Out<CUstream>, flags: u32, priority: i32) -> CUresult {
    status(|| {
        ensure(flags & !NON_BLOCKING == 0 && !out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let role = if flags & NON_BLOCKING == 0 { Role::Blocking } else { Role::NonBlocking };
        let priority = priority.clamp(PRIORITIES[1], PRIORITIES[0]);
        out.put(streams::create(&current::healthy()?, role, priority, current::green())?)
    })
}

pub fn cuStreamDestroy_v2(stream: CUstream) -> CUresult {
    status(|| {
        ensure(stream > 2, CUDA_ERROR_INVALID_HANDLE)?;
        hook::stream_destroyed(stream);
        let stream = current::stream(stream)?;
        streams::destroy(&stream)?;
        Ok(())
    })
}

pub fn cuStreamDestroy(stream: CUstream) -> CUresult {
    cuStreamDestroy_v2(stream)
}

pub fn cuStreamQuery(stream: CUstream) -> CUresult {
    status(|| {
        hook::stream_asked(stream)?;
        let stream = current::stream(stream)?;
        stream.context()?.check()?;
        ensure(stream.is_idle()?, CUDA_ERROR_NOT_READY)
    })
}

pub fn cuStreamSynchronize(stream: CUstream) -> CUresult {
    status(|| {
        hook::stream_asked(stream)?;
        current::stream(stream)?.synchronize()
    })
}

pub fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32) -> CUresult {
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

/// The argument of a callback: the program's pointer, which this library passes on as a number.
fn opaque(pointer: *mut c_void) -> usize {
    pointer as usize
}

pub unsafe fn cuLaunchHostFunc(stream: CUstream, function: *mut c_void, data: *mut c_void) -> CUresult {
    status(|| {
        ensure(!function.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        if let Some(code) = hook::host(stream, function as u64, data as u64) {
            return ensure(code == CUDA_SUCCESS, code);
        }
        // SAFETY: the caller passes such a function.
        let function = unsafe { std::mem::transmute::<*mut c_void, HostFunction>(function) };
        let data = opaque(data);
        current::stream(stream)?.submit(move |context| {
            context.flush_prints();
            // SAFETY: the program passed it to be called with this data.
            unsafe { function(data as *mut c_void) };
            Ok(())
        })?;
        Ok(())
    })
}

/// Unlike a host function, a callback is also called after the context has failed, with the error.
pub unsafe fn cuStreamAddCallback(stream: CUstream, callback: *mut c_void, data: *mut c_void, flags: u32) -> CUresult {
    status(|| {
        ensure(!callback.is_null() && flags == 0, CUDA_ERROR_INVALID_VALUE)?;
        hook::not_capturable(stream)?;
        // SAFETY: the caller passes such a function.
        let callback = unsafe { std::mem::transmute::<*mut c_void, Callback>(callback) };
        let data = opaque(data);
        current::stream(stream)?.submit_always(move |context, state| {
            context.flush_prints();
            // SAFETY: the program passed it to be called with this data.
            unsafe { callback(stream, state.err().unwrap_or(CUDA_SUCCESS), data as *mut c_void) };
            state
        })?;
        Ok(())
    })
}

pub fn cuStreamGetPriority(stream: CUstream, priority: Out<i32>) -> CUresult {
    status(|| priority.put(current::stream(stream)?.priority))
}

pub fn cuStreamGetFlags(stream: CUstream, flags: Out<u32>) -> CUresult {
    status(|| {
        let stream = current::stream(stream)?;
        flags.put(if stream.role() == Role::NonBlocking { NON_BLOCKING } else { 0 })
    })
}

pub fn cuStreamGetId(stream: CUstream, id: Out<u64>) -> CUresult {
    status(|| id.put(current::stream(stream)?.id))
}

pub fn cuStreamGetDevice(stream: CUstream, device: Out<CUdevice>) -> CUresult {
    status(|| device.put(current::stream(stream)?.context()?.device.ordinal as CUdevice))
}

pub fn cuStreamGetCtx(stream: CUstream, context: Out<CUcontext>) -> CUresult {
    status(|| context.put(current::stream(stream)?.home()?))
}

pub fn cuStreamGetGreenCtx(stream: CUstream, green: Out<u64>) -> CUresult {
    status(|| {
        let stream = current::stream(stream)?;
        stream.context()?;
        green.put(stream.green().map_or(0, |it| it.handle))
    })
}

pub fn cuStreamGetCtx_v2(stream: CUstream, context: Out<CUcontext>, green: Out<u64>) -> CUresult {
    status(|| {
        let stream = current::stream(stream)?;
        ensure(stream.handle != CU_STREAM_PER_THREAD || current::green().is_none(), CUDA_ERROR_INVALID_HANDLE)?;
        context.put(stream.context()?.handle)?;
        green.put_if(stream.green().map_or(0, |it| it.handle));
        Ok(())
    })
}

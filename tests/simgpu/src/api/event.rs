//! Events.

use std::sync::Arc;

use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_READY, CUevent, CUresult, CUstream,
};

use crate::current;
use crate::event::Event;
use crate::handles::{self, Object};
use crate::status::{ensure, put, status};

pub unsafe fn cuEventCreate(out: *mut CUevent, flags: u32) -> CUresult {
    status(|| {
        // Blocking waits, no timing, for other processes: the last needs the second.
        ensure(flags & !7 == 0 && flags & 6 != 4, CUDA_ERROR_INVALID_VALUE)?;
        let context = current::healthy()?;
        let handle = handles::next();
        unsafe { put(out, handle) }?;
        handles::insert(handle, Object::Event(Arc::new(Event::new(Arc::downgrade(&context), flags))));
        Ok(())
    })
}

pub unsafe fn cuEventDestroy_v2(event: CUevent) -> CUresult {
    status(|| {
        handles::event(event)?;
        handles::remove(event);
        Ok(())
    })
}

pub unsafe fn cuEventDestroy(event: CUevent) -> CUresult {
    unsafe { cuEventDestroy_v2(event) }
}

pub unsafe fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult {
    status(|| {
        let event = handles::event(event)?;
        let stream = current::stream(stream)?;
        let home = event.context.upgrade().ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        ensure(home.id == stream.context()?.id, CUDA_ERROR_INVALID_HANDLE)?;
        event.record(&stream)
    })
}

pub unsafe fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: u32) -> CUresult {
    if flags & !1 != 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    unsafe { cuEventRecord(event, stream) }
}

pub unsafe fn cuEventQuery(event: CUevent) -> CUresult {
    status(|| {
        let event = handles::event(event)?;
        event.context.upgrade().ok_or(CUDA_ERROR_INVALID_HANDLE)?.check()?;
        ensure(event.is_done(), CUDA_ERROR_NOT_READY)
    })
}

pub unsafe fn cuEventSynchronize(event: CUevent) -> CUresult {
    status(|| {
        let event = handles::event(event)?;
        if let Some(mark) = event.mark() {
            mark.wait();
        }
        let context = event.context.upgrade().ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        context.flush_prints();
        context.check()
    })
}

pub unsafe fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent) -> CUresult {
    status(|| {
        let (start, end) = (handles::event(start)?, handles::event(end)?);
        unsafe { put(milliseconds, Event::elapsed(&start, &end)?) }
    })
}

pub unsafe fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: CUevent, end: CUevent) -> CUresult {
    unsafe { cuEventElapsedTime(milliseconds, start, end) }
}

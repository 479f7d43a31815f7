//! Events.

use std::sync::Arc;

use rekindle_cuda_abi::arguments::Out;
use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUevent, CUresult,
    CUstream,
};
use rekindle_graphs::hook;

use crate::current;
use crate::event::Event;
use crate::handles;
use crate::status::{ensure, status};

pub fn cuEventCreate(out: Out<CUevent>, flags: u32) -> CUresult {
    status(|| {
        // Flags: blocking waits, no timing, for other processes; the last needs the second.
        ensure(flags & !7 == 0 && flags & 6 != 4, CUDA_ERROR_INVALID_VALUE)?;
        let context = current::healthy()?;
        let handle = handles::next();
        out.put(handle)?;
        handles::insert(handle, Arc::new(Event::new(Arc::downgrade(&context), flags)?));
        Ok(())
    })
}

pub fn cuEventDestroy_v2(event: CUevent) -> CUresult {
    status(|| {
        handles::get::<Event>(event)?;
        hook::event_destroyed(event);
        handles::remove(event);
        Ok(())
    })
}

pub fn cuEventDestroy(event: CUevent) -> CUresult {
    cuEventDestroy_v2(event)
}

pub fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult {
    cuEventRecordWithFlags(event, stream, 0)
}

pub fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: u32) -> CUresult {
    status(|| {
        let known = handles::get::<Event>(event)?;
        let on = current::stream(stream)?;
        let home = known.context.upgrade().ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        ensure(home.id == on.context()?.id, CUDA_ERROR_INVALID_HANDLE)?;
        match hook::record(event, stream, flags) {
            Some(code) => ensure(code == CUDA_SUCCESS, code),
            None => known.record(&on),
        }
    })
}

pub fn cuEventQuery(event: CUevent) -> CUresult {
    status(|| {
        let named = event;
        let event = handles::get::<Event>(event)?;
        event.context.upgrade().ok_or(CUDA_ERROR_INVALID_HANDLE)?.check()?;
        hook::event_asked(named)?;
        ensure(event.is_done(), CUDA_ERROR_NOT_READY)
    })
}

pub fn cuEventSynchronize(event: CUevent) -> CUresult {
    status(|| {
        let named = event;
        let event = handles::get::<Event>(event)?;
        hook::event_asked(named)?;
        if let Some(mark) = event.mark() {
            mark.wait();
        }
        if let Some(last) = event.shared().and_then(|shared| shared.last()) {
            last.wait();
        }
        let context = event.context.upgrade().ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        context.flush_prints();
        context.check()
    })
}

pub fn cuEventElapsedTime(milliseconds: Out<f32>, start: CUevent, end: CUevent) -> CUresult {
    status(|| {
        hook::events_compared(start, end)?;
        let (start, end) = (handles::get::<Event>(start)?, handles::get::<Event>(end)?);
        let elapsed = Event::elapsed(&start, &end)?;
        // The driver's error for a null pointer.
        ensure(!milliseconds.is_null(), CUDA_ERROR_INVALID_HANDLE)?;
        milliseconds.put(elapsed)
    })
}

pub fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: CUevent, end: CUevent) -> CUresult {
    cuEventElapsedTime(milliseconds, start, end)
}

//! Events.

use rekindle_cuda_abi::types::*;
use rekindle_graphs::hook;
use rekindle_wire::command::{EVENT_SYNC, Kind};

use super::{check, code};
use crate::client::{self, Call};
use crate::remote;

/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`; interprocess events are not offered yet.
const FLAGS: u32 = 3;

pub(crate) unsafe fn cuEventCreate(event: *mut CUevent, flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        let (context, _) = client.contexts.current()?;
        match flags {
            f if f & !FLAGS == 0 => {}
            // Those for other processes have no times.
            f if f & !(FLAGS | 4) == 0 && f & 2 != 0 => return Err(CUDA_ERROR_NOT_SUPPORTED),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        // SAFETY: the caller's promise by cuda.h; on success the encoder has written the handle.
        unsafe {
            check(remote::cuEventCreate(event, flags))?;
            client.events.insert(*event, context);
        }
        Ok(())
    }))
}

/// Whether a handle is an event's.
pub(super) fn ours(event: CUevent) -> Result<(), CUresult> {
    client::get()?;
    if Kind::Event.owns(event) { Ok(()) } else { Err(CUDA_ERROR_INVALID_HANDLE) }
}

pub(crate) unsafe fn cuEventDestroy_v2(event: CUevent) -> CUresult {
    hook::event_destroyed(event);
    // SAFETY: no pointers.
    code(ours(event).and_then(|()| check(unsafe { remote::cuEventDestroy_v2(event) })).and_then(|()| {
        client::get()?.events.remove(event);
        Ok(())
    }))
}

pub(crate) unsafe fn cuEventDestroy(event: CUevent) -> CUresult {
    // SAFETY: no pointers.
    unsafe { cuEventDestroy_v2(event) }
}

pub(crate) unsafe fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult {
    // SAFETY: no pointers.
    unsafe { cuEventRecordWithFlags(event, stream, 0) }
}

pub(crate) unsafe fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: u32) -> CUresult {
    code(ours(event).and_then(|()| {
        // Of one context with its stream; the driver says so at once.
        let client = client::get()?;
        let of_stream = super::stream::context_of(stream)?;
        if client.events.context(event).is_some_and(|of_event| of_event != of_stream) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        if let Some(answer) = hook::record(event, stream, flags) {
            return check(answer);
        }
        client.events.record(event);
        // SAFETY: no pointers.
        check(unsafe { remote::cuEventRecord(event, stream) })
    }))
}

pub(crate) unsafe fn cuEventQuery(event: CUevent) -> CUresult {
    // SAFETY: no pointers.
    code(hook::event_asked(event).and_then(|()| check(unsafe { remote::cuEventQuery(event) })))
}

pub(crate) unsafe fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(
        hook::events_compared(start, end)
            .and_then(|()| check(unsafe { remote::cuEventElapsedTime(milliseconds, start, end) })),
    )
}

pub(crate) unsafe fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: CUevent, end: CUevent) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(
        hook::events_compared(start, end)
            .and_then(|()| check(unsafe { remote::cuEventElapsedTime_v2(milliseconds, start, end) })),
    )
}

pub(crate) unsafe fn cuEventSynchronize(event: CUevent) -> CUresult {
    code(ours(event).and_then(|()| hook::event_asked(event)).and_then(|()| {
        let mut call = Call::new(EVENT_SYNC)?;
        call.word(event);
        check(call.wait().0)
    }))
}

//! Events.

use rekindle_cuda_abi::types::*;
use rekindle_graphs::hook;
use rekindle_wire::command::{EVENT_SHARE, EVENT_SYNC, OfEvent, SyncEvent};

use super::{check, code};
use crate::call::{perform, remote};
use crate::operations::event;
use crate::state::client::{self, Client};

/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`.
const FLAGS: u32 = 3;
const NO_TIMES: u32 = 2;
/// `CU_EVENT_INTERPROCESS`.
const SHARED: u32 = 4;

pub(crate) unsafe fn cuEventCreate(event: *mut CUevent, flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        let (context, _) = client.contexts.current()?;
        let shared = flags & SHARED != 0;
        // Events for other processes have no times.
        if flags & !(FLAGS | SHARED) != 0 || (shared && flags & NO_TIMES == 0) || event.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller's promise by cuda.h; on success the encoder has written the handle.
        let handle = unsafe {
            check(remote::cuEventCreate(event, flags & FLAGS))?;
            *event
        };
        client.events.insert(handle, context, shared);
        if shared {
            perform(EVENT_SHARE, &OfEvent { event: handle }).inspect_err(|_| destroy(client, handle))?;
        }
        Ok(())
    }))
}

/// Creates an event for other processes, which the caller then connects to another event.
pub(super) fn made_for_others(client: &Client, context: CUcontext) -> Result<CUevent, CUresult> {
    let mut event = 0;
    // SAFETY: the out parameter is a local.
    check(unsafe { remote::cuEventCreate(&raw mut event, NO_TIMES) })?;
    client.events.insert(event, context, true);
    Ok(event)
}

/// Destroys an event that the application does not have yet.
pub(super) fn destroy(client: &Client, event: CUevent) {
    client.events.remove(event);
    // SAFETY: no pointers. What fails here goes with the process.
    unsafe { remote::cuEventDestroy_v2(event) };
}

pub(crate) unsafe fn cuEventDestroy_v2(event: CUevent) -> CUresult {
    hook::event_destroyed(event);
    // SAFETY: no pointers.
    code(event::check_handle(event).and_then(|()| check(unsafe { remote::cuEventDestroy_v2(event) })).and_then(|()| {
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
    code(event::record(event, stream, flags))
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
    code(
        event::check_handle(event)
            .and_then(|()| hook::event_asked(event))
            .and_then(|()| perform(EVENT_SYNC, &SyncEvent { event })),
    )
}

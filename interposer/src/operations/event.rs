//! Events: their handles, and recording them.

use rekindle_cuda_abi::types::*;
use rekindle_graphs::hook;
use rekindle_wire::command::{EVENT_FENCE, EventFence, Kind};

use super::stream;
use crate::call::{perform, remote};
use crate::state::client::{self, Client};

/// Checks that a handle is an event's.
pub(crate) fn check_handle(event: CUevent) -> Result<(), CUresult> {
    client::get()?;
    if Kind::Event.owns(event) { Ok(()) } else { Err(CUDA_ERROR_INVALID_HANDLE) }
}

/// Records an event in a stream, or in the graph that the stream captures.
pub(crate) fn record(event: CUevent, stream: CUstream, flags: u32) -> Result<(), CUresult> {
    check_handle(event)?;
    // The driver checks at once that the event and its stream belong to the same context.
    let client = client::get()?;
    let of_stream = client.contexts.owner(stream::context_of(stream)?);
    if client.events.context(event).is_some_and(|of_event| of_event != of_stream) {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    if let Some(answer) = hook::record(event, stream, flags) {
        return check(answer);
    }
    client.events.record(event);
    // SAFETY: no pointers.
    check(unsafe { remote::cuEventRecord(event, stream) })?;
    // A process that learns of the record afterwards must find it recorded.
    fence(client, event)
}

/// Has a stream, or the graph that it captures, wait for an event's last record.
pub(crate) fn wait(event: CUevent, stream: CUstream, flags: u32) -> Result<(), CUresult> {
    check_handle(event)?;
    let events = &client::get()?.events;
    match hook::wait(stream, event, flags, || events.is_recorded(event)) {
        Some(answer) => check(answer),
        None => wait_in_stream(event, stream, flags),
    }
}

/// Has a stream wait for an event's last record.
pub(crate) fn wait_in_stream(event: CUevent, stream: CUstream, flags: u32) -> Result<(), CUresult> {
    let client = client::get()?;
    // SAFETY: no pointers.
    check(unsafe { remote::cuStreamWaitEvent(stream, event, flags) })?;
    // A process that learns of the wait afterwards may record the event again, and this wait must not be for that record.
    fence(client, event)
}

/// Waits until the worker has taken all commands about an event that other processes may have.
fn fence(client: &Client, event: CUevent) -> Result<(), CUresult> {
    if client.events.is_shared(event) { perform(EVENT_FENCE, &EventFence {}) } else { Ok(()) }
}

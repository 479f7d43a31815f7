//! Streams: looking one up, and waiting for it.

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{OfStream, STREAM_SYNC};

use crate::call::{Call, standing_error, stream_of};
use crate::process::calling_thread::{self, named_stream};
use crate::state::streams::Stream;
use crate::state::{client, contexts, idle};

/// The stream that a parameter names; default streams belong to the current context.
pub(crate) fn named(stream: CUstream) -> Result<Stream, CUresult> {
    let client = client::get()?;
    match named_stream(stream) {
        CU_STREAM_LEGACY => Ok(Stream { context: contexts::current(), flags: 0, priority: 0, id: 1 }),
        CU_STREAM_PER_THREAD => {
            // Apart from all others: made streams count up from 3, threads count down.
            let id = u64::MAX - u64::from(calling_thread::number());
            Ok(Stream { context: contexts::current(), flags: 0, priority: 0, id })
        }
        handle => client.streams.get(handle).ok_or(CUDA_ERROR_INVALID_HANDLE),
    }
}

/// The context of a stream that a parameter names.
pub(crate) fn context_of(stream: CUstream) -> Result<CUcontext, CUresult> {
    let context = named(stream)?.context;
    if context == 0 { Err(CUDA_ERROR_INVALID_CONTEXT) } else { Ok(context) }
}

/// Waits for a stream, whatever captures.
pub(crate) fn synchronize(stream: CUstream) -> Result<(), CUresult> {
    let client = client::get()?;
    if idle::is_idle(&client.connection, stream) {
        return standing_error(client);
    }
    let mut call = Call::in_context(STREAM_SYNC)?;
    call.put(&OfStream { stream: stream_of(stream)? });
    check(call.wait().0)
}

//! Streams that are known to be at rest without asking: what the calling thread has waited for was the last command of all
//! in the ring, and nothing has followed it.

use std::cell::Cell;

use rekindle_cuda_abi::types::*;
use rekindle_wire::ring;

use crate::client::Client;
use crate::named_stream;
use crate::state::contexts;

thread_local! {
    /// A context, a stream by its full name, and the ring's end behind the last command in it, which is done.
    static REST: Cell<(CUcontext, CUstream, u64)> = const { Cell::new((0, 0, 0)) };
}

/// A command in a stream has been waited for; the ring's end is behind it.
pub(crate) fn came(stream: CUstream, end: u64) {
    let _ = REST.try_with(|rest| rest.set((contexts::current(), named_stream(stream), end)));
}

/// Whether nothing of any thread has been enqueued since this thread waited for the last command in that stream. Then it is
/// at rest, and of the legacy stream that holds for all that it waits for.
pub(crate) fn is_at(client: &Client, stream: CUstream) -> bool {
    let now = (contexts::current(), named_stream(stream), ring::end(&client.shared));
    REST.try_with(|rest| rest.get() == now).unwrap_or(false)
}

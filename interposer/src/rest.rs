//! Streams that are known to be at rest without asking: what the calling thread has waited for was the last command of all
//! in the ring, and nothing has followed it.

use std::cell::Cell;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use rekindle_cuda_abi::types::*;
use rekindle_wire::ring;

use crate::client::Client;
use crate::process::calling_thread::named_stream;
use crate::state::contexts;

thread_local! {
    /// A context, a stream by its full name, and the ring's end behind the last command in it, which is done.
    static REST: Cell<(CUcontext, CUstream, u64)> = const { Cell::new((0, 0, 0)) };
}

/// Waiting gives back what memory pools need not keep, so it is no idle question where there are any.
static POOLS: AtomicBool = AtomicBool::new(false);

/// From now on the worker hears of every wait.
pub(crate) fn has_pools() {
    POOLS.store(true, Relaxed);
}

/// A command in a stream has been waited for; the ring's end is behind it.
pub(crate) fn came(stream: CUstream, end: u64) {
    let _ = REST.try_with(|rest| rest.set((contexts::current(), named_stream(stream), end)));
}

/// Whether nothing of any thread has been enqueued since this thread waited for the last command in that stream. Then it is
/// at rest, and of the legacy stream that holds for all that it waits for.
pub(crate) fn is_at(client: &Client, stream: CUstream) -> bool {
    if POOLS.load(Relaxed) {
        return false;
    }
    let now = (contexts::current(), named_stream(stream), ring::end(&client.shared));
    REST.try_with(|rest| rest.get() == now).unwrap_or(false)
}

//! Streams that are idle for certain, without a question to the worker: the calling thread has waited for the last command in
//! the ring, and no command has followed.

use std::cell::Cell;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use rekindle_cuda_abi::types::*;
use rekindle_wire::ring;

use super::contexts;
use crate::connection::Connection;
use crate::process::calling_thread::named_stream;

thread_local! {
    /// A context, a stream by its full name, and the ring's end behind the last command in it, which is done.
    static LAST_WAITED: Cell<(CUcontext, CUstream, u64)> = const { Cell::new((0, 0, 0)) };
}

/// Whether there are memory pools. A wait gives back what they need not keep, so the worker must hear of each.
static POOLS: AtomicBool = AtomicBool::new(false);

/// From now on there are memory pools, and the worker hears of every wait.
pub(crate) fn has_pools() {
    POOLS.store(true, Relaxed);
}

/// A command in a stream has been waited for; the ring's end is behind it.
pub(crate) fn waited_for(stream: CUstream, end: u64) {
    let _ = LAST_WAITED.try_with(|last| last.set((contexts::current(), named_stream(stream), end)));
}

/// Whether nothing of any thread has been enqueued since this thread waited for the last command in that stream. Then the
/// stream is idle; if it is the legacy stream, so are the streams that it waits for.
pub(crate) fn is_idle(connection: &Connection, stream: CUstream) -> bool {
    if POOLS.load(Relaxed) {
        return false;
    }
    let now = (contexts::current(), named_stream(stream), ring::end(&connection.shared));
    LAST_WAITED.try_with(|last| last.get() == now).unwrap_or(false)
}

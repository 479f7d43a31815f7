//! The streams of each context: its default streams, and those that programs create.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use rekindle_cuda_abi::types::{CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUDA_ERROR_CONTEXT_IS_DESTROYED};

use crate::context::Context;
use crate::handles;
use crate::order::Role;
use crate::status::Result;
use crate::stream::Stream;

/// The streams of a context.
#[derive(Debug)]
struct Streams {
    legacy: Arc<Stream>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The per-thread default stream of each thread, by the number that `current` gives the thread.
    per_thread: HashMap<u64, Arc<Stream>>,
    created: Vec<Arc<Stream>>,
}

/// The streams of each context that has not ended, by the context's id.
static STREAMS: RwLock<BTreeMap<u64, Arc<Streams>>> = RwLock::new(BTreeMap::new());

impl Streams {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn of(context: &Context) -> Result<Arc<Streams>> {
    let streams = STREAMS.read().unwrap_or_else(PoisonError::into_inner);
    streams.get(&context.id).cloned().ok_or(CUDA_ERROR_CONTEXT_IS_DESTROYED)
}

/// Gives a new context its legacy default stream.
pub(crate) fn open(context: &Arc<Context>) {
    let legacy = Stream::new(context, CU_STREAM_LEGACY, Role::Legacy, 0);
    let streams = Arc::new(Streams { legacy, state: Mutex::default() });
    STREAMS.write().unwrap_or_else(PoisonError::into_inner).insert(context.id, streams);
}

/// Has the threads of all streams of a context end after their queued commands.
pub(crate) fn close(context: &Context) {
    let Some(streams) = STREAMS.write().unwrap_or_else(PoisonError::into_inner).remove(&context.id) else { return };
    streams.legacy.end();
    let state = streams.state();
    state.per_thread.values().chain(&state.created).for_each(|stream| stream.end());
}

/// Creates a stream; returns its handle.
pub(crate) fn create(context: &Arc<Context>, role: Role, priority: i32) -> Result<u64> {
    let streams = of(context)?;
    let stream = Stream::new(context, handles::next(), role, priority);
    let handle = stream.handle;
    streams.state().created.push(stream.clone());
    handles::insert(handle, stream);
    Ok(handle)
}

/// Ends a stream's handle. The stream's commands are still executed.
pub(crate) fn destroy(stream: &Arc<Stream>) -> Result<()> {
    let context = stream.context()?;
    handles::remove(stream.handle);
    stream.end();
    if let Ok(streams) = of(&context) {
        streams.state().created.retain(|other| !Arc::ptr_eq(other, stream));
    }
    stream.leave_order(&context);
    Ok(())
}

/// The stream that a handle means to a thread in a context.
pub(crate) fn find(context: &Arc<Context>, handle: u64, thread: u64) -> Result<Arc<Stream>> {
    match handle {
        CU_STREAM_LEGACY => Ok(of(context)?.legacy.clone()),
        CU_STREAM_PER_THREAD => {
            let new = || Stream::new(context, CU_STREAM_PER_THREAD, Role::Blocking, 0);
            Ok(of(context)?.state().per_thread.entry(thread).or_insert_with(new).clone())
        }
        _ => handles::get(handle),
    }
}

//! The streams of each context: its default streams, and those that programs create.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use rekindle_cuda_abi::types::{CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUDA_ERROR_CONTEXT_IS_DESTROYED};

use crate::context::Context;
use crate::event::Event;
use crate::green::Green;
use crate::handles;
use crate::order::{Mark, Role};
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
    /// The default stream of each green context, by its id.
    green: HashMap<u64, Arc<Stream>>,
    /// What streams that are made later wait for: those of a green context, by its id, or all.
    gates: Vec<(Option<u64>, Mark)>,
}

impl State {
    /// The gates of a new stream.
    fn gates(&mut self, green: Option<u64>) -> Vec<Mark> {
        self.gates.retain(|(_, mark)| !mark.reached());
        self.gates.iter().filter(|(of, _)| of.is_none() || *of == green).map(|(_, mark)| mark.clone()).collect()
    }
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
    let legacy = Stream::new(context, CU_STREAM_LEGACY, Role::Legacy, 0, None);
    let streams = Arc::new(Streams { legacy, state: Mutex::default() });
    STREAMS.write().unwrap_or_else(PoisonError::into_inner).insert(context.id, streams);
}

/// Has the threads of all streams of a context end after their queued commands.
pub(crate) fn close(context: &Context) {
    let Some(streams) = STREAMS.write().unwrap_or_else(PoisonError::into_inner).remove(&context.id) else { return };
    streams.legacy.end();
    let state = streams.state();
    state.per_thread.values().chain(&state.created).chain(state.green.values()).for_each(|stream| stream.end());
}

/// Creates a stream; returns its handle.
pub(crate) fn create(context: &Arc<Context>, role: Role, priority: i32, green: Option<Arc<Green>>) -> Result<u64> {
    let streams = of(context)?;
    let group = green.as_ref().map(|it| it.id);
    let stream = Stream::new(context, handles::next(), role, priority, green);
    let handle = stream.handle;
    let gates = {
        let mut state = streams.state();
        state.created.push(stream.clone());
        state.gates(group)
    };
    gates.into_iter().try_for_each(|gate| stream.hold(gate))?;
    handles::insert(handle, stream);
    Ok(handle)
}

/// Records an event when all streams of a green context, or of all of a context, have done their present commands.
pub(crate) fn record(context: &Arc<Context>, green: Option<u64>, event: &Event) -> Result<()> {
    let marks = context.order().unreached(green);
    let stream = Stream::new(context, 0, Role::NonBlocking, 0, None);
    let held = marks.into_iter().try_for_each(|mark| stream.hold(mark));
    let recorded = held.and_then(|()| event.record(&stream));
    stream.end();
    stream.leave_order(context);
    recorded
}

/// Makes all streams of a green context, or of all of a context, wait for a moment; streams that are made later, too.
pub(crate) fn hold(context: &Arc<Context>, green: Option<u64>, mark: &Mark) -> Result<()> {
    let streams = of(context)?;
    let all = {
        let mut state = streams.state();
        state.gates.push((green, mark.clone()));
        let others = state.per_thread.values().chain(&state.created).chain(state.green.values());
        others.chain([&streams.legacy]).cloned().collect::<Vec<_>>()
    };
    let wanted = all.iter().filter(|it| green.is_none() || it.green().map(|of| of.id) == green);
    wanted.filter(|it| it.context().is_ok()).try_for_each(|stream| stream.hold(mark.clone()))
}

/// The default stream of a green context.
pub(crate) fn default_of(context: &Arc<Context>, green: &Arc<Green>) -> Result<Arc<Stream>> {
    let streams = of(context)?;
    let (stream, gates) = {
        let mut state = streams.state();
        if let Some(known) = state.green.get(&green.id) {
            return Ok(known.clone());
        }
        let stream = Stream::new(context, CU_STREAM_LEGACY, Role::Legacy, 0, Some(green.clone()));
        state.green.insert(green.id, stream.clone());
        (stream, state.gates(Some(green.id)))
    };
    gates.into_iter().try_for_each(|gate| stream.hold(gate))?;
    Ok(stream)
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
            let streams = of(context)?;
            let (stream, gates) = {
                let mut state = streams.state();
                if let Some(known) = state.per_thread.get(&thread) {
                    return Ok(known.clone());
                }
                let stream = Stream::new(context, CU_STREAM_PER_THREAD, Role::Blocking, 0, None);
                state.per_thread.insert(thread, stream.clone());
                (stream, state.gates(None))
            };
            gates.into_iter().try_for_each(|gate| stream.hold(gate))?;
            Ok(stream)
        }
        _ => handles::get(handle),
    }
}

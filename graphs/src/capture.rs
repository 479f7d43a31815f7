//! Stream capture: which streams record into which graph, which calls a capture allows, and how a capture ends.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::driver::{Role, Stream, StreamKey};
use crate::graph::{Edge, Owner, PORT_PROGRAMMATIC, PROGRAMMATIC};
use crate::graphs::Graphs;
use crate::task::Task;

/// `CUstreamCaptureMode`: which calls that might harm a capture are allowed, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No such call is allowed in the capturing thread, or in other threads that are in this mode too.
    Global,
    /// No such call is allowed in the capturing thread.
    ThreadLocal,
    /// All such calls are allowed.
    Relaxed,
}

impl Mode {
    /// The mode of that number.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub fn new(number: u32) -> Result<Self> {
        Ok(match number {
            0 => Self::Global,
            1 => Self::ThreadLocal,
            2 => Self::Relaxed,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        })
    }
}

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
    static THREAD: u64 = {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Relaxed)
    };
}

/// The calling thread's number.
pub(crate) fn thread() -> u64 {
    THREAD.try_with(|n| *n).unwrap_or(0)
}

/// Sets the calling thread's mode; returns the mode before.
pub(crate) fn exchange_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}

/// The number of captures, and the number of captures and of events that were last recorded in one. Most calls only need to
/// know that both are 0.
static CAPTURES: AtomicUsize = AtomicUsize::new(0);
static OF_INTEREST: AtomicUsize = AtomicUsize::new(0);

/// Whether there is any capture.
#[inline]
pub(crate) fn any() -> bool {
    CAPTURES.load(Relaxed) != 0
}

/// Whether there is any capture, or an event that was last recorded in one.
#[inline]
pub(crate) fn any_or_event() -> bool {
    OF_INTEREST.load(Relaxed) != 0
}

/// A capture.
#[derive(Clone, Debug)]
pub(crate) struct Capture {
    pub(crate) graph: CUgraph,
    mode: Mode,
    /// The thread that began it.
    thread: u64,
    /// The stream that it began in.
    origin: StreamKey,
    pub(crate) invalid: bool,
    /// Whether the graph was there before the capture.
    given: bool,
    /// The last nodes of streams that were destroyed meanwhile.
    left: Vec<CUgraphNode>,
    /// The nodes that streams' commands became. What the program has added itself need not be joined: NCCL leaves a node that records
    /// an event.
    captured: HashSet<CUgraphNode>,
}

/// A stream that takes part in a capture.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) capture: u64,
    role: Role,
    /// The nodes that the stream's next node comes after.
    pub(crate) after: Vec<Edge>,
    /// The arrays that `cuStreamGetCaptureInfo` has handed out.
    pub(crate) shown: (Vec<CUgraphNode>, Vec<CUgraphEdgeData>),
}

/// An event that was last recorded in a capture.
#[derive(Clone, Debug)]
struct Recorded {
    capture: u64,
    after: Vec<Edge>,
}

/// All captures.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    last: u64,
    pub(crate) list: HashMap<u64, Capture>,
    pub(crate) streams: HashMap<StreamKey, Member>,
    events: HashMap<CUevent, Recorded>,
}

/// The state of a stream with regard to captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    None,
    Active(u64),
    Invalidated,
}

impl Captures {
    /// Updates the counts that [`any`] and [`any_or_event`] read.
    pub(crate) fn publish(&self) {
        CAPTURES.store(self.list.len(), Relaxed);
        OF_INTEREST.store(self.list.len() + self.events.len(), Relaxed);
    }

    /// The state of a stream with regard to captures. A member's capture is in the list.
    pub(crate) fn status(&self, stream: StreamKey) -> Status {
        let id = self.streams.get(&stream).map(|m| m.capture);
        match id.and_then(|id| Some((id, self.list.get(&id)?.invalid))) {
            None => Status::None,
            Some((_, true)) => Status::Invalidated,
            Some((id, false)) => Status::Active(id),
        }
    }

    fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.list.get_mut(&capture) {
            capture.invalid = true;
        }
    }

    fn invalidate_all(&mut self, which: impl Fn(&Captures, u64) -> bool) -> bool {
        let ids: Vec<u64> = self.list.keys().copied().filter(|id| which(self, *id)).collect();
        ids.iter().for_each(|id| self.invalidate(*id));
        !ids.is_empty()
    }

    /// Whether a command in the legacy default stream would wait for a capturing stream.
    pub(crate) fn is_implicit(&self, stream: &Stream) -> bool {
        let blocks =
            |(key, member): (&StreamKey, &Member)| key.context == stream.key.context && member.role == Role::Blocking;
        stream.role == Role::Legacy && self.streams.iter().any(blocks)
    }

    /// As [`Captures::is_implicit`]; then those captures are invalid.
    pub(crate) fn refuse_implicit(&mut self, stream: &Stream) -> Result<()> {
        if !self.is_implicit(stream) {
            return Ok(());
        }
        self.invalidate_all(|all, id| {
            all.streams
                .iter()
                .any(|(k, m)| m.capture == id && k.context == stream.key.context && m.role == Role::Blocking)
        });
        Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
    }

    /// A call that might harm a capture: `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` where this thread must not make it, and
    /// the captures that forbid it are invalid.
    pub(crate) fn refuse_unsafe(&mut self) -> Result<()> {
        let (thread, mode) = (thread(), MODE.get());
        let forbids = |all: &Captures, id: u64| {
            all.list.get(&id).is_some_and(|c| {
                let own = c.thread == thread && c.mode != Mode::Relaxed;
                mode != Mode::Relaxed && (own || (mode == Mode::Global && c.mode == Mode::Global))
            })
        };
        if self.invalidate_all(forbids) { Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// A call that waits for all of a context, which no capture of it allows.
    pub(crate) fn refuse_context(&mut self, context: CUcontext) -> Result<()> {
        let takes_part =
            |all: &Captures, id: u64| all.streams.iter().any(|(k, m)| m.capture == id && k.context == context);
        if self.invalidate_all(takes_part) { Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// A call that a capturing stream does not allow.
    pub(crate) fn refuse_in(&mut self, stream: &Stream) -> Result<()> {
        self.refuse_implicit(stream)?;
        match self.streams.get(&stream.key).map(|m| m.capture) {
            Some(capture) => {
                self.invalidate(capture);
                Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
            }
            None => Ok(()),
        }
    }

    /// A question about an event, or a wait of the host for it.
    pub(crate) fn refuse_event(&mut self, event: CUevent) -> Result<()> {
        let Some(recorded) = self.events.get(&event) else { return Ok(()) };
        let capture = recorded.capture;
        if !self.list.contains_key(&capture) {
            // The capture that the event was recorded in is over.
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.invalidate(capture);
        Err(CUDA_ERROR_CAPTURED_EVENT)
    }

    /// An event is destroyed, or recorded outside of captures.
    pub(crate) fn forget_event(&mut self, event: CUevent) {
        self.events.remove(&event);
    }

    /// The nodes that the next node of a stream comes after, for a node of this task.
    fn next_after(&self, stream: StreamKey, task: &Task) -> Vec<Edge> {
        let after = self.streams.get(&stream).map(|m| m.after.clone()).unwrap_or_default();
        match task {
            Task::Kernel(_) => after,
            // Only kernels begin before what they come after has ended.
            _ => after.into_iter().map(|(node, _)| (node, CUgraphEdgeData::default())).collect(),
        }
    }
}

impl Captures {
    /// Begins a capture; into a graph that is there, if one is given.
    pub(crate) fn begin(
        &mut self,
        graphs: &mut Graphs,
        stream: &Stream,
        mode: Mode,
        into: Option<(CUgraph, Vec<Edge>)>,
    ) -> Result<()> {
        if stream.role == Role::Legacy {
            return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        if self.streams.contains_key(&stream.key) {
            return Err(CUDA_ERROR_ILLEGAL_STATE);
        }
        let given = into.is_some();
        let (graph, after) = match into {
            Some((graph, after)) => {
                graphs.check_dependencies(graph, &after, None)?;
                (graph, after)
            }
            None => (graphs.create(Owner::Capture), Vec::new()),
        };
        graphs.graph_mut(graph)?.captures += 1;
        self.last += 1;
        let id = self.last;
        self.list.insert(
            id,
            Capture {
                graph,
                mode,
                thread: thread(),
                origin: stream.key,
                invalid: false,
                given,
                left: Vec::new(),
                captured: HashSet::new(),
            },
        );
        self.streams.insert(stream.key, Member { capture: id, role: stream.role, after, shown: Default::default() });
        Ok(())
    }

    /// Ends the capture that a stream is the origin of.
    pub(crate) fn end(&mut self, graphs: &mut Graphs, stream: &Stream) -> Result<CUgraph> {
        let member = self.streams.get(&stream.key).ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
        let id = member.capture;
        let after: Vec<CUgraphNode> = member.after.iter().map(|e| e.0).collect();
        let capture = self.list.get(&id).cloned().ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
        if capture.origin != stream.key {
            self.invalidate(id);
            return Err(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        }
        let others = self.streams.iter().filter(|(key, m)| m.capture == id && **key != stream.key);
        let open = others.flat_map(|(_, m)| m.after.iter().map(|e| e.0)).chain(capture.left.iter().copied());
        let open: Vec<CUgraphNode> = open.collect();
        let graph = graphs.graph(capture.graph)?;
        let must_be_joined = |n: &CUgraphNode| graph.nodes.contains_key(n) && capture.captured.contains(n);
        let open: Vec<CUgraphNode> = open.into_iter().filter(must_be_joined).collect();
        let joined = graph.reaches(after.into_iter(), &open);
        let verdict = if capture.mode != Mode::Relaxed && capture.thread != thread() {
            Err(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
        } else if capture.invalid {
            Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        } else if !joined {
            Err(CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
        } else {
            Ok(capture.graph)
        };
        self.terminate(graphs, id, verdict.is_ok());
        verdict
    }

    /// Takes a capture out. Events that were recorded in this capture have no meaning from now on.
    fn terminate(&mut self, graphs: &mut Graphs, id: u64, good: bool) {
        let Some(capture) = self.list.remove(&id) else { return };
        self.streams.retain(|_, m| m.capture != id);
        if let Ok(graph) = graphs.graph_mut(capture.graph) {
            graph.captures = graph.captures.saturating_sub(1);
            if good && !capture.given {
                graph.owner = Owner::Program;
            }
        }
        // A failed capture also destroys a graph that was there before: its content is unknown.
        if !good {
            graphs.destroy(capture.graph);
        }
    }

    /// A stream is destroyed. The capture that began in it ends with it; another one goes on, and what the stream did must be joined as
    /// before (NCCL destroys streams that have only waited).
    pub(crate) fn forget_stream(&mut self, graphs: &mut Graphs, stream: StreamKey) {
        let Some(member) = self.streams.remove(&stream) else { return };
        if self.list.get(&member.capture).is_some_and(|c| c.origin == stream) {
            self.terminate(graphs, member.capture, false);
        } else if let Some(capture) = self.list.get_mut(&member.capture) {
            capture.left.extend(member.after.iter().map(|(node, _)| *node));
        }
    }

    /// All streams of a context are destroyed.
    pub(crate) fn forget_context(&mut self, graphs: &mut Graphs, context: CUcontext) {
        let streams: Vec<StreamKey> = self.streams.keys().copied().filter(|k| k.context == context).collect();
        streams.into_iter().for_each(|stream| self.forget_stream(graphs, stream));
    }

    /// A command is enqueued in a stream: `None` where it is to be executed; otherwise the node that it became.
    pub(crate) fn enqueue(
        &mut self,
        graphs: &mut Graphs,
        stream: &Stream,
        task: impl FnOnce() -> Result<Task>,
    ) -> Result<Option<CUgraphNode>> {
        self.enqueue_checked(graphs, stream, false, task)
    }

    /// As [`Captures::enqueue`]; `bad_invalidates` is whether one that is wrong ends the capture.
    pub(crate) fn enqueue_checked(
        &mut self,
        graphs: &mut Graphs,
        stream: &Stream,
        bad_invalidates: bool,
        task: impl FnOnce() -> Result<Task>,
    ) -> Result<Option<CUgraphNode>> {
        self.refuse_implicit(stream)?;
        let id = match self.status(stream.key) {
            Status::None => return Ok(None),
            Status::Invalidated => return Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
            Status::Active(id) => id,
        };
        let task = task().inspect_err(|_| {
            if bad_invalidates {
                self.invalidate(id);
            }
        })?;
        let graph = self.list.get(&id).map(|c| c.graph).ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
        let mut after = self.next_after(stream.key, &task);
        let nodes = &graphs.graph(graph)?.nodes;
        // Nodes that were taken out meanwhile.
        after.retain(|(node, _)| nodes.contains_key(node));
        if let Task::Kernel(kernel) = &task
            && kernel.attributes.get(&PROGRAMMATIC_SERIALIZATION).is_some_and(|v| v.0[0] as u32 != 0)
            && after.iter().all(|(n, d)| {
                *d == CUgraphEdgeData::default() && nodes.get(n).is_some_and(|n| matches!(n.task, Task::Kernel(_)))
            })
        {
            let early = CUgraphEdgeData { from_port: PORT_PROGRAMMATIC, kind: PROGRAMMATIC, ..Default::default() };
            after.iter_mut().for_each(|edge| edge.1 = early);
        }
        let mut task = task;
        if let Task::Kernel(kernel) = &mut task {
            // These attributes say what the edges are; a node does not have them.
            kernel.attributes.retain(|id, _| !EDGE_ATTRIBUTES.contains(id));
        }
        let node = graphs.add_node(graph, &after, task)?;
        if let Some(capture) = self.list.get_mut(&id) {
            capture.captured.insert(node);
        }
        if let Some(member) = self.streams.get_mut(&stream.key) {
            member.after = vec![(node, CUgraphEdgeData::default())];
        }
        Ok(Some(node))
    }

    /// An event is recorded in a stream: whether that is all there is to do.
    pub(crate) fn record(&mut self, event: CUevent, stream: &Stream) -> Result<bool> {
        self.refuse_implicit(stream)?;
        match self.status(stream.key) {
            Status::None => {
                self.forget_event(event);
                Ok(false)
            }
            Status::Invalidated => Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
            Status::Active(capture) => {
                let after = self.streams.get(&stream.key).map(|m| m.after.clone()).unwrap_or_default();
                self.events.insert(event, Recorded { capture, after });
                Ok(true)
            }
        }
    }

    /// A kernel of a capture records an event when it reaches a port of its.
    pub(crate) fn record_at_port(&mut self, event: CUevent, stream: &Stream, node: CUgraphNode, data: CUgraphEdgeData) {
        if let Status::Active(capture) = self.status(stream.key) {
            self.events.insert(event, Recorded { capture, after: vec![(node, data)] });
        }
    }

    /// A stream is to wait for an event: whether that is all there is to do. `recorded` is whether the event has been
    /// recorded outside of captures.
    pub(crate) fn wait(&mut self, stream: &Stream, event: CUevent, recorded: bool) -> Result<bool> {
        let known = self.events.get(&event).cloned();
        let status = self.status(stream.key);
        let Some(Recorded { capture, after }) = known else {
            self.refuse_implicit(stream)?;
            return match status {
                Status::None => Ok(false),
                Status::Invalidated => Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
                Status::Active(_) if !recorded => Ok(true),
                Status::Active(id) => {
                    self.invalidate(id);
                    Err(CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
                }
            };
        };
        let Some(of_event) = self.list.get(&capture) else { return Err(CUDA_ERROR_INVALID_VALUE) };
        if stream.role == Role::Legacy {
            self.invalidate(capture);
            return Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        if of_event.invalid || status == Status::Invalidated {
            return Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        match status {
            Status::Active(id) if id != capture => {
                self.invalidate(id);
                self.invalidate(capture);
                return Err(CUDA_ERROR_STREAM_CAPTURE_MERGE);
            }
            _ => {}
        }
        let new = || Member { capture, role: stream.role, after: Vec::new(), shown: Default::default() };
        let member = self.streams.entry(stream.key).or_insert_with(new);
        for edge in after {
            if !member.after.iter().any(|e| e.0 == edge.0) {
                member.after.push(edge);
            }
        }
        Ok(true)
    }

    /// Changes what a capturing stream's next node comes after.
    pub(crate) fn update_dependencies(
        &mut self,
        graphs: &Graphs,
        stream: &Stream,
        edges: &[Edge],
        replace: bool,
    ) -> Result<()> {
        let id = match self.status(stream.key) {
            Status::None => return Err(CUDA_ERROR_ILLEGAL_STATE),
            Status::Invalidated => return Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
            Status::Active(id) => id,
        };
        let graph = self.list.get(&id).map(|c| c.graph).ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
        graphs.check_dependencies(graph, edges, None)?;
        let member = self.streams.get_mut(&stream.key).ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
        if replace {
            member.after.clear();
        }
        for edge in edges {
            if !member.after.iter().any(|e| e.0 == edge.0) {
                member.after.push(*edge);
            }
        }
        Ok(())
    }
}
/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
pub(crate) const PROGRAMMATIC_SERIALIZATION: u32 = 6;
/// Programmatic stream serialisation, programmatic events and launch completion events.
const EDGE_ATTRIBUTES: [u32; 3] = [PROGRAMMATIC_SERIALIZATION, 7, 12];

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(handle: u64, role: Role) -> Stream {
        Stream { key: StreamKey { context: 1, handle, thread: 0 }, role, priority: 0 }
    }

    fn add((captures, graphs): &mut (Captures, Graphs), stream: &Stream) -> Result<Option<CUgraphNode>> {
        captures.enqueue(graphs, stream, || Ok(Task::Empty))
    }

    const A: u64 = 10;
    const B: u64 = 11;
    const EVENT: u64 = 20;

    #[test]
    fn a_fork_that_is_joined_becomes_a_diamond() {
        let (mut store, a, b) = (<(Captures, Graphs)>::default(), stream(A, Role::Blocking), stream(B, Role::Free));
        assert_eq!(add(&mut store, &a), Ok(None));
        store.0.begin(&mut store.1, &a, Mode::Global, None).unwrap();
        add(&mut store, &a).unwrap();
        assert_eq!(store.0.record(EVENT, &a), Ok(true));
        assert_eq!(store.0.wait(&b, EVENT, false), Ok(true));
        add(&mut store, &b).unwrap();
        add(&mut store, &a).unwrap();
        store.0.record(EVENT, &b).unwrap();
        store.0.wait(&a, EVENT, false).unwrap();
        add(&mut store, &a).unwrap();
        let graph = store.0.end(&mut store.1, &a).unwrap();
        let graph = store.1.graph(graph).unwrap();
        assert_eq!((graph.nodes.len(), graph.edges().len(), graph.owner), (4, 4, Owner::Program));
        assert_eq!(store.0.status(b.key), Status::None);
        // The event has no meaning now.
        assert_eq!(store.0.refuse_event(EVENT), Err(CUDA_ERROR_INVALID_VALUE));
        assert_eq!(store.0.wait(&a, EVENT, false), Err(CUDA_ERROR_INVALID_VALUE));
        assert_eq!(store.0.record(EVENT, &a), Ok(false));
        assert_eq!(store.0.refuse_event(EVENT), Ok(()));
    }

    #[test]
    fn a_fork_with_work_that_is_not_joined_fails_and_one_without_does_not() {
        for work in [false, true] {
            let (mut store, a, b) = (<(Captures, Graphs)>::default(), stream(A, Role::Blocking), stream(B, Role::Free));
            store.0.begin(&mut store.1, &a, Mode::Global, None).unwrap();
            store.0.record(EVENT, &a).unwrap();
            store.0.wait(&b, EVENT, false).unwrap();
            if work {
                add(&mut store, &b).unwrap();
            }
            assert_eq!(store.0.end(&mut store.1, &a).err(), work.then_some(CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
            assert!(store.0.streams.is_empty());
            assert_eq!(store.1.is_empty(), work);
        }
    }

    #[test]
    fn a_stream_may_be_destroyed_when_its_work_is_joined() {
        for (work, joined) in [(false, false), (true, true), (true, false)] {
            let (mut store, a, b) = (<(Captures, Graphs)>::default(), stream(A, Role::Blocking), stream(B, Role::Free));
            store.0.begin(&mut store.1, &a, Mode::Global, None).unwrap();
            add(&mut store, &a).unwrap();
            store.0.record(EVENT, &a).unwrap();
            store.0.wait(&b, EVENT, false).unwrap();
            if work {
                add(&mut store, &b).unwrap();
            }
            if joined {
                store.0.record(EVENT, &b).unwrap();
                store.0.wait(&a, EVENT, false).unwrap();
            }
            store.0.forget_stream(&mut store.1, b.key);
            let fails = (work && !joined).then_some(CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
            assert_eq!(store.0.end(&mut store.1, &a).err(), fails, "{work} {joined}");
        }
    }

    #[test]
    fn a_capture_ends_in_the_stream_and_thread_that_it_began_in() {
        let (mut store, a, b) = (<(Captures, Graphs)>::default(), stream(A, Role::Blocking), stream(B, Role::Free));
        store.0.begin(&mut store.1, &a, Mode::Relaxed, None).unwrap();
        store.0.record(EVENT, &a).unwrap();
        store.0.wait(&b, EVENT, false).unwrap();
        assert_eq!(store.0.end(&mut store.1, &b), Err(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED));
        assert_eq!(store.0.status(a.key), Status::Invalidated);
        assert_eq!(store.0.end(&mut store.1, &a), Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
        assert_eq!(store.0.end(&mut store.1, &a), Err(CUDA_ERROR_ILLEGAL_STATE));
        for (mode, expected) in [
            (Mode::Global, Err(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)),
            (Mode::ThreadLocal, Err(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)),
            (Mode::Relaxed, Ok(())),
        ] {
            let mut store = <(Captures, Graphs)>::default();
            store.0.begin(&mut store.1, &a, mode, None).unwrap();
            let ended = std::thread::scope(|s| s.spawn(|| store.0.end(&mut store.1, &a).map(drop)).join().unwrap());
            assert_eq!(ended, expected);
            assert_eq!(store.0.status(a.key), Status::None);
        }
    }

    #[test]
    fn what_a_thread_must_not_do_depends_on_both_modes() {
        let a = stream(A, Role::Blocking);
        for (capture, other, allowed) in [
            (Mode::Global, Mode::Global, false),
            (Mode::Global, Mode::ThreadLocal, true),
            (Mode::Global, Mode::Relaxed, true),
            (Mode::ThreadLocal, Mode::Global, true),
            (Mode::Relaxed, Mode::Global, true),
        ] {
            let mut store = <(Captures, Graphs)>::default();
            store.0.begin(&mut store.1, &a, capture, None).unwrap();
            let refused = std::thread::scope(|s| {
                let work = || {
                    exchange_mode(other);
                    store.0.refuse_unsafe()
                };
                s.spawn(work).join().unwrap()
            });
            assert_eq!(refused.is_ok(), allowed, "{capture:?} {other:?}");
            assert_eq!(store.0.status(a.key) == Status::Invalidated, !allowed);
        }
        for (capture, own, allowed) in [
            (Mode::Global, Mode::ThreadLocal, false),
            (Mode::ThreadLocal, Mode::Global, false),
            (Mode::Global, Mode::Relaxed, true),
            (Mode::Relaxed, Mode::Global, true),
        ] {
            let mut store = <(Captures, Graphs)>::default();
            store.0.begin(&mut store.1, &a, capture, None).unwrap();
            let before = exchange_mode(own);
            assert_eq!(store.0.refuse_unsafe().is_ok(), allowed, "{capture:?} {own:?}");
            exchange_mode(before);
        }
    }

    #[test]
    fn the_legacy_stream_is_refused_while_a_blocking_one_captures() {
        let legacy = Stream { key: StreamKey { context: 1, handle: 1, thread: 0 }, role: Role::Legacy, priority: 0 };
        let (mut store, free) = (<(Captures, Graphs)>::default(), stream(B, Role::Free));
        store.0.begin(&mut store.1, &free, Mode::Global, None).unwrap();
        assert_eq!(add(&mut store, &legacy), Ok(None));
        let blocking = stream(A, Role::Blocking);
        store.0.begin(&mut store.1, &blocking, Mode::Relaxed, None).unwrap();
        assert_eq!(add(&mut store, &legacy), Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT));
        assert_eq!(store.0.status(blocking.key), Status::Invalidated);
        assert!(matches!(store.0.status(free.key), Status::Active(_)));
        assert_eq!(
            store.0.begin(&mut store.1, &legacy, Mode::Relaxed, None),
            Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        );
    }

    #[test]
    fn captures_do_not_merge_and_do_not_wait_for_what_is_outside() {
        let (mut store, a, b) = (<(Captures, Graphs)>::default(), stream(A, Role::Blocking), stream(B, Role::Free));
        store.0.begin(&mut store.1, &a, Mode::Relaxed, None).unwrap();
        store.0.begin(&mut store.1, &b, Mode::Relaxed, None).unwrap();
        store.0.record(EVENT, &a).unwrap();
        assert_eq!(store.0.wait(&b, EVENT, false), Err(CUDA_ERROR_STREAM_CAPTURE_MERGE));
        assert_eq!(store.0.status(a.key), Status::Invalidated);
        assert_eq!(store.0.status(b.key), Status::Invalidated);
        let mut store = <(Captures, Graphs)>::default();
        store.0.begin(&mut store.1, &a, Mode::Relaxed, None).unwrap();
        assert_eq!(store.0.wait(&a, EVENT, false), Ok(true));
        assert_eq!(store.0.wait(&a, EVENT, true), Err(CUDA_ERROR_STREAM_CAPTURE_ISOLATION));
        assert_eq!(add(&mut store, &a), Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    }

    #[test]
    fn a_question_about_a_captured_event_invalidates() {
        let (mut store, a) = (<(Captures, Graphs)>::default(), stream(A, Role::Blocking));
        store.0.begin(&mut store.1, &a, Mode::Relaxed, None).unwrap();
        store.0.record(EVENT, &a).unwrap();
        assert_eq!(store.0.refuse_event(EVENT), Err(CUDA_ERROR_CAPTURED_EVENT));
        assert_eq!(store.0.status(a.key), Status::Invalidated);
        store.0.forget_stream(&mut store.1, a.key);
        assert!(store.0.list.is_empty() && store.1.is_empty());
    }
}

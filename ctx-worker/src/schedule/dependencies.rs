//! What a command has to do with streams and events: what it must come after, and what must come after it.

use rekindle_cuda_abi::table::{Effect, Function};
use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Reader;
use rekindle_wire::command::{self, Kind, Launch};
use rekindle_wire::ring::CommandHeader;

use crate::serve::executor::Executor;
use crate::session::waiting::StreamKey;

/// How a stream is ordered with the legacy default stream of its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// It is that stream: each of its commands comes after all earlier ones of blocking streams, and before all later.
    Legacy,
    /// Ordered with it.
    Blocking,
    /// Not ordered with it.
    Free,
}

/// A stream that a command is enqueued in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) key: StreamKey,
    pub(crate) role: Role,
}

/// What a command does with an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventUse {
    Record,
    /// Makes a stream or a caller wait for the event's last record, or asks for it.
    Wait,
    /// Nothing that names it may come before, or be before it.
    Destroy,
}

/// What else a command must come after.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Scope {
    #[default]
    Nothing,
    /// Everything in a context.
    Context(u64),
    /// Everything in all contexts.
    Everything,
}

/// How a command's turn is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It goes to the driver.
    #[default]
    Execute,
    /// It asks whether something is done. Rather than being held it is told that it is not.
    Ask,
    /// The application runs a callback, when the stream has come to it.
    Callback,
    /// It goes to the driver when the device has done all that it has, in all streams; and it ends this context, 0 for none.
    AtRest(u64),
}

/// What a command has to do with streams and events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Uses {
    /// The context that it needs.
    pub(crate) context: u64,
    pub(crate) lane: Option<Lane>,
    pub(crate) events: Vec<(u64, EventUse)>,
    pub(crate) scope: Scope,
    pub(crate) turn: Turn,
}

/// The same for a line of the table: where its parameters are.
#[derive(Debug, Default)]
struct Shape {
    stream: Option<usize>,
    events: Vec<(usize, EventUse)>,
    scope: Scope,
    turn: Turn,
}

/// All lines of the table.
#[derive(Debug)]
pub(crate) struct Shapes(Vec<Shape>);

impl Shapes {
    pub(crate) fn new(table: &[Function]) -> Self {
        Self(table.iter().map(shape).collect())
    }

    /// Which words of a command's parameters name events, of a line of the table.
    pub(crate) fn events(&self, call: u16) -> impl Iterator<Item = usize> {
        self.0.get(usize::from(call)).into_iter().flat_map(|shape| shape.events.iter().map(|(word, _)| *word))
    }
}

fn shape(function: &Function) -> Shape {
    let mut shape = Shape::default();
    if !function.route.travels() {
        return shape;
    }
    let event = match (&function.effect, function.symbol.as_str()) {
        (Effect::Destroys(_), _) => EventUse::Destroy,
        (_, "cuEventRecord") => EventUse::Record,
        _ => EventUse::Wait,
    };
    // Parameters are words up to the first text.
    let params = function.params.iter().flatten().take_while(|p| p.c_type != "const char *");
    for (word, param) in params.enumerate() {
        match param.c_type.as_str() {
            "CUstream" => shape.stream = shape.stream.or(Some(word)),
            "CUevent" => shape.events.push((word, event)),
            _ => {}
        }
    }
    if matches!(function.symbol.as_str(), "cuStreamQuery" | "cuEventQuery")
        || function.symbol.starts_with("cuEventElapsedTime")
    {
        shape.turn = Turn::Ask;
    }
    // What else sets something the driver does at once, and held launches keep what they had (`held_settings`). For a limit
    // it waits itself.
    if function.symbol == "cuCtxSetLimit" {
        shape.scope = Scope::Everything;
    }
    shape
}

/// A word of a command's parameters.
pub(crate) fn word(parameters: &[u8], at: usize) -> Option<u64> {
    parameters.get(at * 8..at * 8 + 8)?.try_into().ok().map(u64::from_le_bytes)
}

impl Executor {
    /// What a command has to do with streams and events. One that names what does not exist has nothing to do with
    /// any: it fails when it is executed, at once.
    pub(crate) fn uses(&self, header: &CommandHeader, parameters: &[u8]) -> Uses {
        let mut uses = Uses { context: header.context, ..Default::default() };
        let stream = |at: usize| word(parameters, at).and_then(|handle| self.lane(header, handle));
        let event = |at: usize, what| word(parameters, at).map(|handle| (handle, what));
        if let Some(shape) = self.scheduler.shapes.0.get(usize::from(header.call)) {
            uses.lane = shape.stream.and_then(stream);
            uses.events.extend(shape.events.iter().filter_map(|&(at, what)| event(at, what)));
            (uses.scope, uses.turn) = (shape.scope, shape.turn);
            return uses;
        }
        match header.call {
            command::LAUNCH => {
                uses.lane = stream(5);
                // Most have no attributes, so no events.
                const ATTRIBUTES_LENGTH: usize = 6;
                if word(parameters, ATTRIBUTES_LENGTH).is_some_and(|length| length != 0)
                    && let Ok(launch) = Launch::read(&mut Reader::new(parameters))
                {
                    uses.events.extend(launch.events().map(|event| (event, EventUse::Record)));
                }
            }
            command::COPY | command::COPY_FROM_CHUNK | command::COPY_TO_CHUNK => uses.lane = stream(3),
            command::COPY_BYTES => uses.lane = stream(1),
            command::STREAM_SYNC | command::STREAM_DESTROY | command::MEM_OPS => uses.lane = stream(0),
            command::HOST_FUNC => {
                uses.lane = stream(0);
                uses.turn = Turn::Callback;
            }
            command::EVENT_SYNC => uses.events.extend(event(0, EventUse::Wait)),
            command::CONTEXT_SYNC => uses.scope = word(parameters, 0).map_or(Scope::Nothing, Scope::Context),
            command::MEM_FREE | command::PIECE_UNMAP | command::PINNED_UNMAP | command::THREAD_END => {
                uses.scope = Scope::Everything
            }
            command::MODULE_UNLOAD | command::LIBRARY_UNLOAD => {
                uses.scope = Scope::Everything;
                uses.turn = Turn::AtRest(0);
            }
            command::CONTEXT_RESET | command::CONTEXT_RELEASE | command::CONTEXT_DESTROY => {
                let context = word(parameters, 0).unwrap_or(0);
                uses.scope = Scope::Context(context);
                uses.turn = Turn::AtRest(context);
            }
            command::CONTEXT_RETAIN => {
                uses.context = word(parameters, 0).unwrap_or(0);
                // A context that was let go is made anew.
                let ordinal = word(parameters, 1).and_then(|o| usize::try_from(o).ok());
                if ordinal.and_then(|o| self.memory.devices.get(o)).is_some_and(|d| d.used) {
                    uses.turn = Turn::AtRest(0);
                }
            }
            command::COPY_BOX => uses.lane = stream(15),
            command::COPY_BOX_FROM_CHUNK | command::COPY_BOX_TO_CHUNK | command::COPY_BOX_BYTES => {
                uses.lane = stream(10)
            }
            command::POOL_FREE => uses.lane = stream(1),
            // Launches of one graph follow each other, and a change is for those after it.
            command::GRAPH_LAUNCH | command::GRAPH_UPLOAD => {
                uses.lane = stream(1);
                uses.events.extend(event(0, EventUse::Destroy));
            }
            command::GRAPH_SET | command::GRAPH_DESTROY => uses.events.extend(event(0, EventUse::Destroy)),
            command::GRAPH_CREATE => {}
            // The driver waits for all streams when an array is destroyed, host callbacks included (driver 580, an H100);
            // nobody waits for the end of a texture.
            command::ARRAY_DESTROY | command::MIPMAP_DESTROY | command::TEXTURE_DESTROY => {
                uses.scope = Scope::Everything;
            }
            // Memory of a pool is there at once, whatever is held in the stream that gets it.
            command::POOL_CREATE..=command::POOL_SET_CURRENT => {}
            // What is mapped anew was not used before; what loses access or its addresses is not used any more.
            command::ADDRESS_RESERVE..=command::PIECE_GRANULARITY => {}
            // It is of no stream.
            command::MEMORY_EXPORT..=command::EVENT_FENCE => {}
            command::TENSOR_MAP => {}
            // What is held in the meantime was enqueued with the access that there was.
            command::PEER_ENABLE => {}
            // They make objects, or ask for what does not change.
            command::FIRST..=command::LAUNCH
            | command::ARRAY_CREATE
            | command::MIPMAP_CREATE
            | command::TEXTURE_CREATE
            | command::SURFACE_CREATE
            | command::CALLBACK_NEXT
            | command::HELD_ROOM => {}
            command::MEM_INFO | command::OCCUPANCY_BLOCK_SIZE | command::OCCUPANCY_CLUSTERS | command::PRINTS => {}
            command::LINK_CREATE..=command::CODE_LOG => {}
            // Until it says here what it has to do with streams, it comes after everything that is held.
            _ => uses.scope = Scope::Everything,
        }
        uses
    }

    /// The stream that a command's parameter names.
    fn lane(&self, header: &CommandHeader, handle: u64) -> Option<Lane> {
        let context = header.context;
        let key = |context, thread| StreamKey { context, handle, thread };
        Some(match handle {
            CU_STREAM_LEGACY => Lane { key: key(context, 0), role: Role::Legacy },
            CU_STREAM_PER_THREAD => Lane { key: key(context, header.thread), role: Role::Blocking },
            handle => {
                let stream = self.session.objects.get(handle).filter(|o| o.kind == Kind::Stream)?;
                let role = if self.scheduler.deferred.is_free(handle) { Role::Free } else { Role::Blocking };
                Lane { key: key(stream.context, 0), role }
            }
        })
    }
}

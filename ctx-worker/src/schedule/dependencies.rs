//! The streams and events of a command: which commands it must follow, and which must follow it.

use std::collections::HashSet;

use rekindle_cuda_abi::table::{Effect, Function};
use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Reader;
use rekindle_wire::command::{self, Clause, Kind, Launch};
use rekindle_wire::ring::CommandHeader;

use crate::resources::Memory;
use crate::session::Session;
use crate::session::waiting::StreamKey;

/// How a stream is ordered with the legacy default stream of its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The legacy default stream itself: each of its commands follows all earlier commands of blocking streams, and precedes
    /// all later ones.
    Legacy,
    /// The stream is ordered with the legacy default stream.
    Blocking,
    /// The stream is not ordered with it.
    Free,
}

/// A stream in which a command is enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) key: StreamKey,
    pub(crate) role: Role,
}

/// The use that a command makes of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventUse {
    Record,
    /// Makes a stream or a caller wait for the event's last record, or queries it.
    Wait,
    /// Commands that name the event may neither overtake this one nor be overtaken by it.
    Destroy,
}

/// Further commands that a command must follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Scope {
    #[default]
    Nothing,
    /// All commands in a context.
    Context(u64),
    /// All commands in all contexts.
    Everything,
}

/// How a command is executed when its turn comes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The command goes to the driver.
    #[default]
    Execute,
    /// The command asks whether work is done. If it would be deferred, the answer is that the work is not done.
    Ask,
    /// The application runs a callback, when the stream has reached it.
    Callback,
    /// The command goes to the driver when the device has completed all work, in all streams. The command ends this context (0
    /// for none).
    AtRest(u64),
}

/// The streams, events and contexts that determine a command's order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dependencies {
    /// The context that the command needs.
    pub(crate) context: u64,
    pub(crate) lane: Option<Lane>,
    pub(crate) events: Vec<(u64, EventUse)>,
    pub(crate) scope: Scope,
    pub(crate) turn: Turn,
}

/// The same for all commands with one number: the words of the parameters that contain each.
#[derive(Debug, Default)]
struct Shape {
    /// The context that the command needs, if that is not the current one.
    context: Option<usize>,
    stream: Option<usize>,
    /// Words that name events.
    events: Vec<(usize, EventUse)>,
    /// Words that name objects that are ordered like events, but are not events.
    alone: Vec<usize>,
    /// Launch attributes, which may name events.
    attributes: Option<usize>,
    scope: ScopeShape,
    turn: TurnShape,
}

#[derive(Debug, Default)]
enum ScopeShape {
    #[default]
    Nothing,
    Context(usize),
    Everything,
}

#[derive(Debug, Default)]
enum TurnShape {
    #[default]
    Execute,
    Ask,
    Callback,
    AtRest,
    EndsContext(usize),
    /// At rest, if the context of the device was used and released.
    Renews(usize),
}

/// The shapes of all lines of the table, and of all other declared commands.
#[derive(Debug)]
pub(crate) struct Shapes {
    lines: Vec<Shape>,
    /// Indexed by the number from [`command::FIRST`] on.
    commands: Vec<Option<Shape>>,
}

impl Shapes {
    pub(crate) fn new(table: &[Function]) -> Self {
        let mut commands = Vec::new();
        for declaration in command::DECLARED {
            let place = usize::from(declaration.number - command::FIRST);
            if commands.len() <= place {
                commands.resize_with(place + 1, || None);
            }
            commands[place] = Some(declared(declaration.clauses));
        }
        Self { lines: table.iter().map(shape).collect(), commands }
    }

    fn get(&self, call: u16) -> Option<&Shape> {
        match call.checked_sub(command::FIRST) {
            None => self.lines.get(usize::from(call)),
            Some(place) => self.commands.get(usize::from(place))?.as_ref(),
        }
    }

    /// The words of a command's parameters that name events.
    pub(crate) fn events(&self, call: u16) -> impl Iterator<Item = usize> {
        self.get(call).into_iter().flat_map(|shape| shape.events.iter().map(|(word, _)| *word))
    }

    /// Whether a command has launch attributes, which may name events.
    pub(crate) fn has_attributes(&self, call: u16) -> bool {
        self.get(call).is_some_and(|shape| shape.attributes.is_some())
    }
}

/// The shape from a command's declaration.
fn declared(clauses: &[Clause]) -> Shape {
    let mut shape = Shape::default();
    for clause in clauses {
        match *clause {
            Clause::InStream(place) => shape.stream = Some(place),
            Clause::WaitsFor(place) => shape.events.push((place, EventUse::Wait)),
            Clause::RecordsBy(place) => shape.attributes = Some(place),
            Clause::Alone(place) => shape.alone.push(place),
            Clause::AfterEverything => shape.scope = ScopeShape::Everything,
            Clause::AfterContext(place) => shape.scope = ScopeShape::Context(place),
            Clause::AtRest => shape.turn = TurnShape::AtRest,
            Clause::EndsContext(place) => {
                shape.scope = ScopeShape::Context(place);
                shape.turn = TurnShape::EndsContext(place);
            }
            Clause::Renews { context, device } => {
                shape.context = Some(context);
                shape.turn = TurnShape::Renews(device);
            }
            Clause::Callback => shape.turn = TurnShape::Callback,
            // Clauses about memory.
            Clause::Through(_)
            | Clause::Writes { .. }
            | Clause::Reads { .. }
            | Clause::WritesBox { .. }
            | Clause::ReadsBox { .. }
            | Clause::Operates(_)
            | Clause::Launches
            | Clause::LaunchesEach(_)
            | Clause::LaunchesGraph(_) => {}
        }
    }
    shape
}

/// The shape of a line of the table.
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
    // Parameters are words up to the first text parameter.
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
        shape.turn = TurnShape::Ask;
    }
    // The driver applies other settings at once, and deferred launches keep their values (`deferred_settings`). For a limit the
    // driver itself waits.
    if function.symbol == "cuCtxSetLimit" {
        shape.scope = ScopeShape::Everything;
    }
    shape
}

/// Streams that are not ordered with the legacy default stream.
#[derive(Debug, Default)]
pub(crate) struct FreeStreams(HashSet<u64>);

impl FreeStreams {
    /// Called when `cuStreamCreateWithPriority` was executed.
    pub(crate) fn created(&mut self, handle: u64, args: &Reader<'_>) {
        const NON_BLOCKING: u64 = 1;
        if word(args.all(), 1) == Some(NON_BLOCKING) {
            self.0.insert(handle);
        }
    }

    /// Called when an object was destroyed, which may have been a stream.
    pub(crate) fn destroyed(&mut self, handle: u64) {
        self.0.remove(&handle);
    }
}

/// A word of a command's parameters.
pub(crate) fn word(parameters: &[u8], at: usize) -> Option<u64> {
    parameters.get(at * 8..at * 8 + 8)?.try_into().ok().map(u64::from_le_bytes)
}

impl Shapes {
    /// The streams and events of a command. A command that names an unknown object has none: it fails when it is executed, at
    /// once.
    pub(crate) fn dependencies(
        &self,
        streams: &FreeStreams,
        session: &Session,
        memory: &Memory,
        header: &CommandHeader,
        parameters: &[u8],
    ) -> Dependencies {
        let Some(shape) = self.get(header.call) else {
            // The number belongs to no command: the command is refused, after all deferred commands.
            return Dependencies { context: header.context, scope: Scope::Everything, ..Default::default() };
        };
        let at = |place: usize| word(parameters, place);
        let mut events: Vec<_> = shape.events.iter().filter_map(|&(place, what)| Some((at(place)?, what))).collect();
        events.extend(shape.alone.iter().filter_map(|&place| Some((at(place)?, EventUse::Destroy))));
        // Most launches have no attributes, so no events.
        if shape.attributes.and_then(at).is_some_and(|length| length != 0)
            && let Ok(launch) = Launch::read(&mut Reader::new(parameters))
        {
            events.extend(launch.events().map(|event| (event, EventUse::Record)));
        }
        Dependencies {
            context: shape.context.map_or(header.context, |place| at(place).unwrap_or(0)),
            lane: shape.stream.and_then(at).and_then(|handle| lane(streams, session, header, handle)),
            events,
            scope: match shape.scope {
                ScopeShape::Nothing => Scope::Nothing,
                ScopeShape::Context(place) => at(place).map_or(Scope::Nothing, Scope::Context),
                ScopeShape::Everything => Scope::Everything,
            },
            turn: match shape.turn {
                TurnShape::Execute => Turn::Execute,
                TurnShape::Ask => Turn::Ask,
                TurnShape::Callback => Turn::Callback,
                TurnShape::AtRest => Turn::AtRest(0),
                TurnShape::EndsContext(place) => Turn::AtRest(at(place).unwrap_or(0)),
                // A context that was released is created anew.
                TurnShape::Renews(place) if is_let_go(memory, at(place)) => Turn::AtRest(0),
                TurnShape::Renews(_) => Turn::Execute,
            },
        }
    }
}

/// Whether the primary context of a device was used, and released.
fn is_let_go(memory: &Memory, ordinal: Option<u64>) -> bool {
    let ordinal = ordinal.and_then(|o| usize::try_from(o).ok());
    ordinal.and_then(|o| memory.devices.get(o)).is_some_and(|device| device.used)
}

/// The stream that a command's parameter names.
fn lane(streams: &FreeStreams, session: &Session, header: &CommandHeader, handle: u64) -> Option<Lane> {
    let context = header.context;
    let key = |context, thread| StreamKey { context, handle, thread };
    Some(match handle {
        CU_STREAM_LEGACY => Lane { key: key(context, 0), role: Role::Legacy },
        CU_STREAM_PER_THREAD => Lane { key: key(context, header.thread), role: Role::Blocking },
        handle => {
            let stream = session.objects.get(handle).filter(|o| o.kind == Kind::Stream)?;
            let role = if streams.0.contains(&handle) { Role::Free } else { Role::Blocking };
            Lane { key: key(stream.context, 0), role }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::fixture;
    use std::fmt::Write;

    /// The streams and events of each command, found with parameters that tell their places: word 5 contains 1005. Commands
    /// without streams and events are omitted.
    fn observed() -> String {
        let worker = fixture::executor();
        let table = rekindle_cuda_abi::table::parse(rekindle_cuda_abi::table::TEXT).unwrap();
        let mut out = String::new();
        for call in command::FIRST..u16::MAX {
            let Some(name) = command::name(&table, call) else { continue };
            let parameters = |stream: Option<usize>| -> Vec<u8> {
                let word = |at| if Some(at) == stream { CU_STREAM_LEGACY } else { 1000 + at as u64 };
                (0..20).map(word).flat_map(u64::to_le_bytes).collect()
            };
            let header = CommandHeader { call, context: 7, ..Default::default() };
            let dependencies =
                worker.scheduler.dependencies(&worker.call.session, &worker.memory, &header, &parameters(None));
            let in_stream = |at: &usize| {
                worker
                    .scheduler
                    .dependencies(&worker.call.session, &worker.memory, &header, &parameters(Some(*at)))
                    .lane
                    .is_some()
            };
            let stream: Vec<usize> = (0..20).filter(in_stream).collect();
            if dependencies == (Dependencies { context: 7, ..Default::default() }) && stream.is_empty() {
                continue;
            }
            write!(out, "{name} stream {stream:?} events {:?}", dependencies.events).unwrap();
            writeln!(out, " {:?} {:?} in {}", dependencies.scope, dependencies.turn, dependencies.context).unwrap();
        }
        out
    }

    #[test]
    fn each_command_is_ordered_as_it_was_when_that_was_written_by_hand() {
        let kept = include_str!("dependencies_of_commands.txt");
        assert_eq!(observed(), kept);
    }
}

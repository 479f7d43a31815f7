//! A span, and the spans of one operation.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rekindle_wire::control::{CommandSpan, TraceParent};

use super::super::sys;

/// The program whose work a span is: OpenTelemetry's resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::daemon) enum Program {
    Daemon,
    /// `rekindle`, with its pid as the daemon sees it.
    Command(i32),
    /// A worker, with its pid as the daemon sees it.
    Worker(i32),
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::daemon) enum Value {
    Text(String),
    Number(u64),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<i32> for Value {
    fn from(number: i32) -> Self {
        Self::Number(u64::from(number.unsigned_abs()))
    }
}

/// A span that is over.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::daemon) struct Span {
    pub(in crate::daemon) program: Program,
    pub(in crate::daemon) place: TraceParent,
    pub(in crate::daemon) parent: Option<u64>,
    pub(in crate::daemon) name: &'static str,
    /// In nanoseconds since 1970.
    pub(in crate::daemon) start: u64,
    pub(in crate::daemon) end: u64,
    pub(in crate::daemon) attributes: Vec<(&'static str, Value)>,
    /// Why the operation has failed, if it has.
    pub(in crate::daemon) failure: Option<String>,
}

/// The spans of one operation. Their times lie on one clock: a change of the system's clock meanwhile moves none against another.
#[derive(Debug)]
pub(in crate::daemon) struct Batch {
    /// The same time on both clocks.
    now: (Instant, u64),
    spans: Vec<Span>,
}

impl Batch {
    /// No spans yet.
    pub(in crate::daemon) fn new() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { now: (Instant::now(), nanoseconds(since)), spans: Vec::new() }
    }

    /// A time in nanoseconds since 1970.
    pub(in crate::daemon) fn at(&self, time: Instant) -> u64 {
        let (now, ns) = self.now;
        let later = nanoseconds(time.saturating_duration_since(now));
        ns.saturating_sub(nanoseconds(now.saturating_duration_since(time))).saturating_add(later)
    }

    /// A span at this place, below the span of that number. It belongs to the batch when it is pushed.
    pub(in crate::daemon) fn span(
        &self,
        program: Program,
        (place, parent): (TraceParent, Option<u64>),
        name: &'static str,
        (start, end): (Instant, Instant),
    ) -> Span {
        let (start, end) = (self.at(start), self.at(end));
        let (attributes, failure) = (Vec::new(), None);
        Span { program, place, parent, name, start, end: end.max(start), attributes, failure }
    }

    /// Adds a span below another one; nothing where there is no number for it. It can be changed until the next one is added.
    pub(in crate::daemon) fn below(
        &mut self,
        program: Program,
        parent: TraceParent,
        name: &'static str,
        times: (Instant, Instant),
    ) -> Option<&mut Span> {
        let place = parent.another(sys::random().ok()?);
        let span = self.span(program, (place, Some(parent.span)), name, times);
        Some(self.push(span))
    }

    /// Adds a span.
    pub(in crate::daemon) fn push(&mut self, span: Span) -> &mut Span {
        self.spans.push(span);
        let last = self.spans.len() - 1;
        &mut self.spans[last]
    }

    pub(super) fn into_spans(self) -> Vec<Span> {
        self.spans
    }
}

impl Span {
    /// The span of a command, until this time in nanoseconds since 1970.
    pub(in crate::daemon) fn of_command(name: &'static str, pid: i32, command: &CommandSpan, end: u64) -> Self {
        let CommandSpan { span, parent, began_ns } = *command;
        let (attributes, failure) = (Vec::new(), None);
        let program = Program::Command(pid);
        Self { program, place: span, parent, name, start: began_ns.min(end), end, attributes, failure }
    }

    /// Adds an attribute.
    pub(in crate::daemon) fn set(&mut self, name: &'static str, value: impl Into<Value>) -> &mut Self {
        self.attributes.push((name, value.into()));
        self
    }
}

fn nanoseconds(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_child_has_its_parents_trace_and_lies_where_it_was() {
        let mut batch = Batch::new();
        let began = Instant::now();
        let (early, late) = (began + Duration::from_millis(3), began + Duration::from_millis(8));
        let place = TraceParent::first(7, 8);
        let outer = batch.span(Program::Daemon, (place, None), "outer", (began, late));
        batch.push(outer);
        batch.below(Program::Worker(4), place, "inner", (early, late)).unwrap().set("bytes", 5_u64);
        let [outer, inner] = batch.into_spans().try_into().unwrap();
        assert_eq!((inner.place.trace, inner.parent), (7, Some(8)));
        assert_ne!(inner.place.span, 8);
        assert_eq!((inner.start - outer.start, inner.end), (3_000_000, outer.end));
        assert_eq!(inner.attributes, [("bytes", Value::Number(5))]);
    }
}

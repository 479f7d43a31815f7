//! The spans of a restore, made when everything is loaded, or when the restore has failed.
//!
//! ```text
//!   rekindle restore ── restore ─┬─ check, workers, prepare, criu, connect, wait, open     until the processes run
//!                                └─ load ── code, replay, map, content                      each worker's, also after that
//! ```
//!
//! The command's span ends with the restore: a command without `-d` lives as long as the program.

use std::time::Instant;

use rekindle_wire::control::{CommandSpan, TraceParent};

use super::super::spans::{Batch, Program, Span};

/// A part of a restore, or a step of a load: when it began and ended.
pub(super) type Stretch = (&'static str, Instant, Instant);

/// The load of one client, in its worker.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) worker: i32,
    pub(super) pid: Option<i32>,
    pub(super) command: String,
    pub(super) bytes: u64,
    pub(super) times: (Instant, Instant),
    pub(super) steps: Vec<Stretch>,
}

/// The command that has begun the restore: its process, and its span.
pub(in crate::daemon) type Command = Option<(i32, CommandSpan)>;

/// Makes the spans of a restore that ends now. The restore's own, which is returned beside, is to be given its outcome and added.
pub(super) fn of(
    place: TraceParent,
    command: Command,
    times: (Instant, Instant),
    parts: &[Stretch],
    loads: &[Load],
) -> (Batch, Span) {
    let mut batch = Batch::new();
    let own = batch.span(Program::Daemon, (place, command.map(|(_, it)| it.span.span)), "restore", times);
    if let Some((pid, command)) = command {
        let end = batch.at(times.1);
        batch.push(Span::of_command("rekindle restore", pid, &command, end));
    }
    for (name, from, to) in parts {
        batch.below(Program::Daemon, place, name, (*from, *to));
    }
    for load in loads {
        let program = Program::Worker(load.worker);
        let Some(span) = batch.below(program, place, "load", load.times) else { continue };
        span.set("rekindle.client.command", load.command.as_str()).set("rekindle.bytes", load.bytes);
        if let Some(pid) = load.pid {
            span.set("rekindle.client.pid", pid);
        }
        let of_load = span.place;
        for (name, from, to) in &load.steps {
            batch.below(program, of_load, name, (*from, *to));
        }
    }
    (batch, own)
}

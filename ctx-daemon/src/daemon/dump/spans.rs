//! The spans of a dump, made when it is over.
//!
//! ```text
//!   checkpoint ─┬─ moment, pre-copy, quiesce, freeze, copy, write, resume, commit     the daemon's phases
//!               └─ pre-copy round, secure, save                                       each worker's, in its client's name
//! ```
//!
//! Phases that are sums of times, not stretches of time (`stall`, `wait`, and `hash` and `clone`, which workers tell as sums),
//! are attributes of `checkpoint`, or of the worker's `secure`.

use std::time::{Duration, Instant};

use rekindle_images::{Phase, PhaseName};
use rekindle_wire::control::{Secured, TraceParent};

use super::super::clients::Client;
use super::super::spans::{Batch, Program, Span};

/// A stretch of a worker's work.
#[derive(Clone, Debug)]
pub(super) struct Work {
    name: &'static str,
    worker: i32,
    pid: i32,
    command: String,
    times: (Instant, Instant),
    numbers: Vec<(&'static str, u64)>,
}

impl Work {
    /// A round of copying before the quiesce.
    pub(super) fn precopy(client: &Client, began: Instant, bytes: u64) -> Self {
        Self::of(client, "pre-copy round", began, vec![("rekindle.bytes", bytes)])
    }

    /// The worker has made sure that the memory can be copied later as it is.
    pub(super) fn secure(client: &Client, began: Instant, secured: &Secured) -> Self {
        let numbers = vec![
            ("rekindle.bytes", secured.bytes),
            ("rekindle.hash.bytes", secured.hashed),
            ("rekindle.hash.ns", secured.hash_ns),
            ("rekindle.clone.bytes", secured.cloned),
            ("rekindle.clone.ns", secured.clone_ns),
        ];
        Self::of(client, "secure", began, numbers)
    }

    /// All memory is in the image's files.
    pub(super) fn save(client: &Client, began: Instant, bytes: u64) -> Self {
        Self::of(client, "save", began, vec![("rekindle.bytes", bytes)])
    }

    fn of(client: &Client, name: &'static str, began: Instant, numbers: Vec<(&'static str, u64)>) -> Self {
        Self {
            name,
            worker: client.worker.pid(),
            pid: client.process.pid,
            command: client.attach.command.clone(),
            times: (began, Instant::now()),
            numbers,
        }
    }
}

/// What is known of a dump's times when it is over.
#[derive(Debug)]
pub(super) struct Times<'a> {
    /// The dump's own place, and its parent's number.
    pub(super) place: (TraceParent, Option<u64>),
    pub(super) began: Instant,
    pub(super) moment: Option<(Instant, Instant)>,
    /// When the manifest's phases begin to count, and they.
    pub(super) phases: Option<(Instant, &'a [Phase])>,
    pub(super) works: &'a [Work],
}

/// Makes the spans below the dump's own, and the dump's own, which is to be given its outcome and added.
pub(super) fn of(times: &Times<'_>) -> (Batch, Span) {
    let ended = Instant::now();
    let mut batch = Batch::new();
    let (place, parent) = times.place;
    let mut all = batch.span(Program::Daemon, (place, parent), "checkpoint", (times.began, ended));
    if let Some(moment) = times.moment {
        batch.below(Program::Daemon, place, "moment", moment);
    }
    if let Some((began, phases)) = times.phases {
        let at = |ns| began + Duration::from_nanos(ns);
        let mut last = began;
        for phase in phases {
            let (from, to) = (at(phase.start), at(phase.start.saturating_add(phase.duration)));
            match phase.name {
                PhaseName::Stall => {
                    all.set("rekindle.stall.ns", phase.duration);
                }
                PhaseName::Wait => {
                    all.set("rekindle.wait.ns", phase.duration);
                }
                PhaseName::Hash | PhaseName::Clone => {}
                name => {
                    let span = batch.below(Program::Daemon, place, name.as_str(), (from, to));
                    if let Some(span) = span.filter(|_| phase.bytes > 0) {
                        span.set("rekindle.bytes", phase.bytes);
                    }
                    last = last.max(to);
                }
            }
        }
        // CRIU's files are written, the manifest, and the commit record.
        batch.below(Program::Daemon, place, "commit", (last.min(ended), ended));
    }
    for work in times.works {
        let Some(span) = batch.below(Program::Worker(work.worker), place, work.name, work.times) else { continue };
        span.set("rekindle.client.pid", work.pid).set("rekindle.client.command", work.command.as_str());
        for (name, number) in &work.numbers {
            span.set(name, *number);
        }
    }
    (batch, all)
}

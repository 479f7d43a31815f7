//! One checkpoint of one tree, by CRIU or by an engine of containers.

use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, anyhow};
use rekindle_images::Protocol;
use rekindle_wire::control::{CheckInfo, CommandSpan, DumpInfo, DumpOutcome, FailureKind, Reply, Request};
use serde_json::Value;

use super::maker::Maker;
use super::options::Options;
use super::report::Report;
use crate::bar::Bar;
use crate::daemon;
use crate::daemon::Session;
use crate::failure::Failure;
use crate::span;

/// The pause between two looks at the progress of a dump.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How many such pauses the daemon may take to notice that CRIU has ended.
const POLLS: u32 = 40;

/// A dump that was tried.
pub(super) struct Attempt {
    pub(super) status: ExitStatus,
    /// None where the daemon knows of no GPU process in the dump, or has ended.
    info: Option<DumpInfo>,
    /// Lines of the log that report errors.
    errors: Vec<String>,
    /// What podman has told of a checkpoint.
    statistics: Option<Value>,
}

/// Makes one checkpoint: the report, and whether it was made.
pub(super) fn one(options: &Options, maker: &Maker, socket: &Path) -> Result<(Report, Result<(), Failure>), Failure> {
    let span = span::begin();
    let mut report = Report::of(maker);
    if let Some(processes) = obstacles(socket, maker.root())? {
        report.refused(processes);
        return Ok((report, Err(Failure::refused(anyhow!("{} cannot be checkpointed now", maker.what())))));
    }
    let moment_ms = options.at_moment.then(|| options.timeout.saturating_mul(1000));
    let mut attempt = attempt(socket, maker, options.protocol, moment_ms, (Bar::new(), span))?;
    if attempt.has_mispredicted() && options.protocol != Some(Protocol::Stop) {
        eprintln!("rekindle: {}; trying again with protocol stop", attempt.reason());
        report.again();
        attempt =
            self::attempt(socket, maker, Some(Protocol::Stop), moment_ms, (Bar::new(), span.and_then(span::again)))?;
    }
    let result = attempt.conclude(maker, &mut report);
    Ok((report, result))
}

/// Why the processes of a tree cannot be checkpointed, if they cannot.
pub(super) fn obstacles(socket: &Path, pid: i32) -> Result<Option<Vec<CheckInfo>>, Failure> {
    let Reply::Checked(processes) = daemon::ask(socket, &Request::Check { pid })? else {
        return Err(daemon::unexpected_answer().into());
    };
    let refused = processes.iter().any(|it| !it.reasons.is_empty());
    Ok(refused.then_some(processes))
}

/// Has a program make a checkpoint, which belongs to the span.
pub(super) fn attempt(
    socket: &Path,
    maker: &Maker,
    protocol: Option<Protocol>,
    moment_ms: Option<u64>,
    (mut bar, span): (Bar, Option<CommandSpan>),
) -> Result<Attempt, Failure> {
    let protocol = protocol.map(|it| it.as_str().to_owned());
    let request = Request::Checkpoint { root: maker.root(), protocol, moment_ms, span };
    let (order, reply) = Session::open(socket, &request)?;
    if reply != Reply::Awaited {
        return Err(daemon::unexpected_answer().into());
    }
    let mut running = maker.start(span.map(|it| it.span))?;
    let status = loop {
        if let Some(status) = running.try_wait().with_context(|| format!("cannot wait for {}", maker.name()))? {
            break status;
        }
        if bar.is_shown() {
            // Where the daemon has ended, CRIU reports that.
            if let Some(info) = progress(&order) {
                bar.show(&info.phase, info.done, info.bytes);
            }
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    bar.clear();
    let mut info = progress(&order);
    for _ in 0..POLLS {
        if status.success() || info.as_ref().is_none_or(|it| it.outcome.is_some()) {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
        info = progress(&order);
    }
    let errors = if status.success() { Vec::new() } else { maker.errors(&mut running) };
    let statistics = maker.statistics(&mut running);
    Ok(Attempt { status, info, errors, statistics })
}

fn progress(order: &Session) -> Option<DumpInfo> {
    match order.ask(&Request::Progress) {
        Ok(Reply::Progress(info)) => info,
        _ => None,
    }
}

impl Attempt {
    /// Reports the outcome.
    pub(super) fn conclude(mut self, maker: &Maker, report: &mut Report) -> Result<(), Failure> {
        if self.status.success() {
            maker.wait_until_stopped();
            report.done(self.info.as_ref(), self.statistics.take());
            return Ok(());
        }
        let reason = self.reason();
        report.failed(self.kind(), &reason, &self.errors);
        Err(Failure::of_kind(self.kind(), anyhow!("cannot checkpoint {}: {reason}", maker.what())))
    }

    /// The reason of a failure, from the daemon or from CRIU.
    fn reason(&self) -> String {
        let said = self.info.as_ref().and_then(|it| it.outcome.as_ref());
        match (said, self.errors.first()) {
            // The daemon has only noticed that CRIU ended; CRIU knows why.
            (Some(DumpOutcome::Failed(failure)), Some(error)) if failure.kind == FailureKind::GivenUp => error.clone(),
            (Some(DumpOutcome::Failed(failure)), _) => failure.reason.clone(),
            (_, Some(error)) => error.clone(),
            _ => format!("the command ended with {}", self.status),
        }
    }

    /// The kind of a failure, from the daemon. `Other` where only CRIU knows.
    pub(super) fn kind(&self) -> FailureKind {
        match self.info.as_ref().and_then(|it| it.outcome.as_ref()) {
            Some(DumpOutcome::Failed(failure)) => failure.kind,
            _ => FailureKind::Other,
        }
    }

    pub(super) fn has_mispredicted(&self) -> bool {
        !self.status.success() && self.kind() == FailureKind::Mispredicted
    }
}

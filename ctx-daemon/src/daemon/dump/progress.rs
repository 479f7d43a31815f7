//! The progress of a dump, for listings while it goes on.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rekindle_images::{Committed, Manifest, Phase, PhaseName, Protocol};
use rekindle_wire::control::{DumpInfo, DumpOutcome, Failure, FailureKind, PhaseInfo, TraceParent};

use super::super::clients::Client;
use super::super::lock;
use super::super::metrics::{Dumped, Metrics};
use super::super::spans::Spans;
use super::spans::{self, Times, Work};

/// The unit in which `stat` counts a file's blocks.
const BLOCK: u64 = 512;

/// The progress; the threads that make the dump update it, others read it.
pub(in crate::daemon) struct Progress {
    began: Instant,
    state: Mutex<State>,
    metrics: Arc<Metrics>,
    spans: Arc<Spans>,
    /// The dump's span, and its parent's number; none if nobody wants its spans.
    place: Option<(TraceParent, Option<u64>)>,
}

/// How far a dump that goes on is.
#[derive(Clone, Copy, Debug)]
pub(in crate::daemon) struct Present {
    /// The phase, as in listings, and how long the dump has been in it.
    pub(in crate::daemon) phase: &'static str,
    pub(in crate::daemon) in_phase: Duration,
    /// Bytes of GPU memory.
    pub(in crate::daemon) bytes: u64,
}

/// The name of the phase in which a dump waits for the application's moment.
const MOMENT: &str = "moment";

/// The name of the phase in which a dump whose image is durable waits until its tree is handed over to another host.
const HAND_OVER: &str = "hand-over";

struct State {
    phase: PhaseName,
    /// When the phase, or the wait for the moment, began or ended last.
    since: Instant,
    /// The dump waits for the application's moment.
    waits: bool,
    /// The dump waits until its tree is handed over.
    hands_over: bool,
    /// The wait for the moment: from when, and, if it is over, until when.
    moment: Option<(Instant, Option<Instant>)>,
    /// The clients' processes.
    pids: Vec<i32>,
    /// Bytes of GPU memory.
    bytes: u64,
    /// The files that memory is written to, while it is.
    files: Vec<File>,
    /// The bytes that are certainly in the files.
    saved: u64,
    /// The protocol in the manifest's words, and the reason for it.
    protocol: (String, String),
    /// The protocol that the dump was planned with.
    planned: Option<Protocol>,
    /// The phases, which count from this time.
    phases: Option<(Instant, Vec<Phase>)>,
    /// What workers have done, if anybody wants to know.
    works: Vec<Work>,
    /// What is recorded when the image is durable.
    dumped: Option<Dumped>,
    outcome: Option<DumpOutcome>,
    ended: Option<Instant>,
}

impl Default for Progress {
    /// A progress that nobody asks for.
    fn default() -> Self {
        Self::new(Arc::default(), Arc::default(), None)
    }
}

impl Progress {
    /// A dump begins, below this span if there is one; the metrics hear of its end.
    pub(in crate::daemon) fn new(metrics: Arc<Metrics>, spans: Arc<Spans>, parent: Option<TraceParent>) -> Self {
        let now = Instant::now();
        let state = State {
            phase: PhaseName::Quiesce,
            since: now,
            waits: false,
            hands_over: false,
            moment: None,
            pids: Vec::new(),
            bytes: 0,
            files: Vec::new(),
            saved: 0,
            protocol: Default::default(),
            planned: None,
            phases: None,
            works: Vec::new(),
            dumped: None,
            outcome: None,
            ended: None,
        };
        let place = spans.begin(parent).map(|place| (place, parent.map(|it| it.span)));
        Self { began: now, state: Mutex::new(state), metrics, spans, place }
    }

    /// Sets the clients that are dumped, which have so much memory.
    pub(super) fn clients<'a>(&self, clients: impl Iterator<Item = &'a Client>, bytes: u64) {
        let mut state = lock(&self.state);
        state.pids = clients.map(|it| it.process.pid).collect();
        state.bytes = bytes;
    }

    /// Sets whether the dump waits for its application's moment; the application is these processes.
    pub(in crate::daemon) fn waits(&self, waits: bool, pids: &[i32]) {
        let mut state = lock(&self.state);
        let now = Instant::now();
        (state.waits, state.since) = (waits, now);
        let from = state.moment.map_or(now, |(from, _)| from);
        state.moment = Some((from, (!waits).then_some(now)));
        state.pids = pids.to_vec();
    }

    /// Sets whether the dump waits until its tree is handed over.
    pub(super) fn waits_for_hand_over(&self, waits: bool) {
        let mut state = lock(&self.state);
        (state.hands_over, state.since) = (waits, Instant::now());
    }

    /// Whether the dump waits for the application.
    pub(in crate::daemon) fn is_awaiting(&self) -> bool {
        lock(&self.state).waits
    }

    /// Whether the clients are at rest, or the dump is over.
    pub(in crate::daemon) fn is_at_rest(&self) -> bool {
        let state = lock(&self.state);
        !state.waits && state.phase != PhaseName::Quiesce || state.outcome.is_some()
    }

    /// Sets the phase.
    pub(super) fn phase(&self, phase: PhaseName) {
        let now = Instant::now();
        let mut state = lock(&self.state);
        (state.phase, state.since) = (phase, now);
    }

    /// Sets the protocol that the dump is planned with.
    pub(super) fn planned(&self, protocol: Protocol) {
        lock(&self.state).planned = Some(protocol);
    }

    /// Adds a file that memory is written to.
    pub(super) fn writes(&self, file: &File) {
        // A file that cannot be examined is not counted.
        lock(&self.state).files.extend(file.try_clone().ok());
    }

    /// Adds bytes that are in the files.
    pub(super) fn saved(&self, bytes: u64) {
        let mut state = lock(&self.state);
        state.saved = state.saved.saturating_add(bytes);
    }

    /// A worker has done something.
    pub(super) fn worked(&self, work: impl FnOnce() -> Work) {
        if self.place.is_some() {
            let work = work();
            lock(&self.state).works.push(work);
        }
    }

    /// The image is complete but for its commit; takes the protocol and the phases, which count from this time, from the manifest.
    pub(super) fn describe(&self, manifest: &Manifest, began: Instant) {
        let dumped = Dumped::of(manifest);
        let mut state = lock(&self.state);
        state.dumped = Some(dumped);
        state.protocol = (manifest.protocol.as_str().to_owned(), manifest.protocol_reason.clone());
        state.phases = Some((began, manifest.phases.clone()));
    }

    /// The dump has succeeded: the image is durable, so long after the dump began.
    pub(super) fn durable(&self, committed: &Committed, took: Duration) {
        let mut state = lock(&self.state);
        let (protocol, protocol_reason) = state.protocol.clone();
        let phase =
            |it: &Phase| PhaseInfo { name: it.name.as_str().to_owned(), duration_ns: it.duration, bytes: it.bytes };
        let phases = state.phases.iter().flat_map(|(_, phases)| phases).map(phase).collect();
        let (id, bytes) = (committed.id.to_string(), committed.bytes);
        let dumped = state.dumped.take();
        let ended = state.end(DumpOutcome::Durable { id, protocol, protocol_reason, bytes, phases });
        drop(state);
        if ended {
            self.trace();
        }
        if let Some(dumped) = dumped.filter(|_| ended) {
            self.metrics.checkpoint_done(&dumped, bytes, took);
        }
    }

    /// The dump has failed.
    pub(super) fn failed(&self, failure: &Failure) {
        let mut state = lock(&self.state);
        let (ended, planned) = (state.end(DumpOutcome::Failed(failure.clone())), state.planned);
        drop(state);
        if ended {
            self.trace();
            self.metrics.checkpoint_failed(failure.kind, planned);
        }
    }

    /// Exports the spans of a dump that is over.
    fn trace(&self) {
        let Some(place) = self.place else { return };
        let state = lock(&self.state);
        let (mut batch, mut all) = spans::of(&Times {
            place,
            began: self.began,
            moment: state.moment.and_then(|(from, to)| Some((from, to?))),
            phases: state.phases.as_ref().map(|(began, phases)| (*began, phases.as_slice())),
            works: &state.works,
        });
        all.set("rekindle.gpu.bytes", state.bytes);
        match &state.outcome {
            Some(DumpOutcome::Durable { id, protocol, protocol_reason, bytes, .. }) => {
                all.set("rekindle.image.id", id.as_str()).set("rekindle.image.bytes", *bytes);
                all.set("rekindle.protocol", protocol.as_str());
                all.set("rekindle.protocol.reason", protocol_reason.as_str());
            }
            Some(DumpOutcome::Failed(failure)) => {
                all.set("rekindle.phase", state.phase()).set("error.type", failure.kind.as_str());
                all.failure = Some(failure.reason.clone());
            }
            None => {}
        }
        drop(state);
        batch.push(all);
        self.spans.send(batch);
    }

    /// The dump is over, if it was not before. The outcome of a dump without clients is unknown: only CRIU knows it.
    pub(in crate::daemon) fn end(&self) {
        if !lock(&self.state).pids.is_empty() {
            let reason = "given up: CRIU ended, or was ended, before the image was durable";
            self.failed(&Failure::new(FailureKind::GivenUp, reason));
        }
    }

    /// How far a dump of clients is; none of another, or if it is over.
    pub(in crate::daemon) fn present(&self) -> Option<Present> {
        let state = lock(&self.state);
        let goes_on = state.outcome.is_none() && !state.pids.is_empty();
        goes_on.then(|| Present { phase: state.phase(), in_phase: state.since.elapsed(), bytes: state.bytes })
    }

    /// Whether this process is one of the dumped processes.
    pub(in crate::daemon) fn has(&self, pid: i32) -> bool {
        lock(&self.state).pids.contains(&pid)
    }

    /// Whether the dump has clients, or has failed because of a process of ours.
    pub(in crate::daemon) fn is_of_clients(&self) -> bool {
        let state = lock(&self.state);
        !state.pids.is_empty() || state.outcome.is_some()
    }

    /// The progress in a listing's form.
    pub(in crate::daemon) fn info(&self) -> DumpInfo {
        let state = lock(&self.state);
        let blocks = state.files.iter().filter_map(|it| it.metadata().ok()).map(|it| it.blocks()).sum::<u64>();
        let elapsed = state.ended.unwrap_or_else(Instant::now).saturating_duration_since(self.began);
        let durable = matches!(state.outcome, Some(DumpOutcome::Durable { .. }));
        let done = if durable { state.bytes } else { state.saved.max(blocks.saturating_mul(BLOCK)).min(state.bytes) };
        DumpInfo {
            phase: state.phase().to_owned(),
            done,
            bytes: state.bytes,
            elapsed_ms: u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX),
            outcome: state.outcome.clone(),
        }
    }
}

impl State {
    fn phase(&self) -> &'static str {
        match (self.waits, self.hands_over) {
            (true, _) => MOMENT,
            (_, true) => HAND_OVER,
            _ => self.phase.as_str(),
        }
    }

    /// Sets the outcome. The first one counts: later failures follow from it. Returns whether it is the first.
    fn end(&mut self, outcome: DumpOutcome) -> bool {
        let is_first = self.outcome.is_none();
        self.outcome.get_or_insert(outcome);
        self.ended.get_or_insert_with(Instant::now);
        self.files.clear();
        is_first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_the_files_is_done_and_the_first_outcome_counts() {
        let progress = Progress::default();
        lock(&progress.state).bytes = 1 << 20;
        let mut file = tempfile::tempfile().unwrap();
        progress.writes(&file);
        assert_eq!(progress.info().done, 0);
        std::io::Write::write_all(&mut file, &[1; 64 << 10]).unwrap();
        file.sync_all().unwrap();
        let done = progress.info().done;
        assert!((64 << 10..1 << 20).contains(&done), "{done}");
        progress.saved(4 << 20);
        assert_eq!(progress.info().done, 1 << 20, "never more than there is");
        progress.failed(&Failure::internal("first"));
        progress.end();
        assert_eq!(progress.info().outcome, Some(DumpOutcome::Failed(Failure::internal("first"))));
    }
}

//! The progress of a dump, for listings while it goes on.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Mutex;
use std::time::Instant;

use rekindle_images::{Committed, Manifest, Phase, PhaseName};
use rekindle_wire::control::{DumpInfo, DumpOutcome, Failure, FailureKind, PhaseInfo};

use super::super::clients::Client;
use super::super::lock;

/// The unit in which `stat` counts a file's blocks.
const BLOCK: u64 = 512;

/// The progress; the threads that make the dump update it, others read it.
pub(in crate::daemon) struct Progress {
    began: Instant,
    state: Mutex<State>,
}

struct State {
    phase: PhaseName,
    /// The dump waits for the application's moment.
    waits: bool,
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
    phases: Vec<PhaseInfo>,
    outcome: Option<DumpOutcome>,
    ended: Option<Instant>,
}

impl Default for Progress {
    fn default() -> Self {
        let state = State {
            phase: PhaseName::Quiesce,
            waits: false,
            pids: Vec::new(),
            bytes: 0,
            files: Vec::new(),
            saved: 0,
            protocol: Default::default(),
            phases: Vec::new(),
            outcome: None,
            ended: None,
        };
        Self { began: Instant::now(), state: Mutex::new(state) }
    }
}

impl Progress {
    /// Sets the clients that are dumped, which have so much memory.
    pub(super) fn clients<'a>(&self, clients: impl Iterator<Item = &'a Client>, bytes: u64) {
        let mut state = lock(&self.state);
        state.pids = clients.map(|it| it.process.pid).collect();
        state.bytes = bytes;
    }

    /// Sets whether the dump waits for its application's moment; the application is these processes.
    pub(in crate::daemon) fn waits(&self, waits: bool, pids: &[i32]) {
        let mut state = lock(&self.state);
        state.waits = waits;
        state.pids = pids.to_vec();
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
        lock(&self.state).phase = phase;
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

    /// The image is complete but for its commit; takes the protocol from the manifest.
    pub(super) fn describe(&self, manifest: &Manifest) {
        let phase =
            |it: &Phase| PhaseInfo { name: it.name.as_str().to_owned(), duration_ns: it.duration, bytes: it.bytes };
        let mut state = lock(&self.state);
        state.protocol = (manifest.protocol.as_str().to_owned(), manifest.protocol_reason.clone());
        state.phases = manifest.phases.iter().map(phase).collect();
    }

    /// The dump has succeeded: the image is durable.
    pub(super) fn durable(&self, committed: &Committed) {
        let mut state = lock(&self.state);
        let (protocol, protocol_reason) = state.protocol.clone();
        let phases = std::mem::take(&mut state.phases);
        let (id, bytes) = (committed.id.to_string(), committed.bytes);
        state.end(DumpOutcome::Durable { id, protocol, protocol_reason, bytes, phases });
    }

    /// The dump has failed.
    pub(super) fn failed(&self, failure: &Failure) {
        lock(&self.state).end(DumpOutcome::Failed(failure.clone()));
    }

    /// The dump is over, if it was not before. The outcome of a dump without clients is unknown: only CRIU knows it.
    pub(in crate::daemon) fn end(&self) {
        let mut state = lock(&self.state);
        if !state.pids.is_empty() {
            let reason = "given up: CRIU ended, or was ended, before the image was durable";
            state.end(DumpOutcome::Failed(Failure::new(FailureKind::GivenUp, reason)));
        }
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
            phase: if state.waits { "moment" } else { state.phase.as_str() }.to_owned(),
            done,
            bytes: state.bytes,
            elapsed_ms: u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX),
            outcome: state.outcome.clone(),
        }
    }
}

impl State {
    /// Sets the outcome. The first one counts: later failures follow from it.
    fn end(&mut self, outcome: DumpOutcome) {
        self.outcome.get_or_insert(outcome);
        self.ended.get_or_insert_with(Instant::now);
        self.files.clear();
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

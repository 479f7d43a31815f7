//! What others tell the metrics, when it is over.

use std::time::Duration;

use rekindle_images::{Manifest, PhaseName, Protocol, Storage};
use rekindle_wire::control::{FailureKind, LoadTimes, Request};

use super::families::{self, Metrics, SOURCES, SpanEnd, end};

/// A dump whose image is complete but for its commit.
#[derive(Clone, Debug)]
pub(in crate::daemon) struct Dumped {
    protocol: &'static str,
    /// The phases: name, duration, and bytes.
    phases: Vec<(&'static str, Duration, u64)>,
    content: Content,
}

/// The content of memory in an image, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Content {
    /// In the image's own files, before and after compression.
    stored: u64,
    compressed: u64,
    zero: u64,
    /// In images that it builds on.
    base: u64,
}

impl Dumped {
    /// What the manifest says.
    pub(in crate::daemon) fn of(manifest: &Manifest) -> Self {
        let phases = manifest.phases.iter();
        Self {
            protocol: families::protocol(Some(manifest.protocol)),
            phases: phases.map(|it| (it.name.as_str(), Duration::from_nanos(it.duration), it.bytes)).collect(),
            content: Content::of(manifest),
        }
    }
}

impl Dumped {
    /// Bytes a second of what is in the image's files, from the beginning of the copy until the disk has all. None where there is
    /// nothing, or where some of it was copied before.
    fn rate(&self) -> Option<f64> {
        let took = |name| self.phases.iter().find(|it| it.0 == name).map_or(Duration::ZERO, |it| it.1);
        let before = self.phases.iter().any(|it| it.0 == PhaseName::PreCopy.as_str());
        let time = took(PhaseName::Copy.as_str()) + took(PhaseName::Write.as_str());
        let is_known = !before && !time.is_zero() && self.content.compressed > 0;
        is_known.then(|| self.content.compressed as f64 / time.as_secs_f64())
    }
}

impl Content {
    fn of(manifest: &Manifest) -> Self {
        let mut content = Self::default();
        let regions = manifest.clients.iter().flat_map(|it| it.regions());
        for piece in regions.flat_map(|it| it.pieces) {
            let sum = match &piece.storage {
                Storage::Zero => &mut content.zero,
                Storage::Parent { .. } => &mut content.base,
                Storage::Stored(extent) => {
                    content.compressed = content.compressed.saturating_add(extent.length);
                    &mut content.stored
                }
            };
            *sum = sum.saturating_add(piece.length);
        }
        content
    }
}

/// A restore that has loaded everything.
pub(in crate::daemon) struct Restored<'a> {
    /// What was ready for the image.
    pub(in crate::daemon) source: Start,
    pub(in crate::daemon) running: Duration,
    pub(in crate::daemon) loaded: Duration,
    /// The phases until the processes ran.
    pub(in crate::daemon) phases: &'a [(&'static str, Duration)],
    /// The times of each process's load, where its worker has told them.
    pub(in crate::daemon) loads: &'a [LoadTimes],
}

/// What a restore finds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::daemon) enum Start {
    /// It has failed before it looked.
    #[default]
    Unknown,
    /// The image is not kept warm.
    Cold,
    /// The image's files are in host memory.
    Warm,
    /// Workers have loaded the image but for its GPU memory.
    Prepared,
    /// Workers have all.
    Resident,
}

impl Start {
    /// The name, as in the metrics.
    pub(in crate::daemon) fn as_str(self) -> &'static str {
        let [cold, warm, prepared, resident, none] = SOURCES;
        match self {
            Self::Unknown => none,
            Self::Cold => cold,
            Self::Warm => warm,
            Self::Prepared => prepared,
            Self::Resident => resident,
        }
    }
}

/// How the pool has answered a request for a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon) enum Taken {
    /// A worker was ready.
    Ready,
    Waited,
    Failed,
}

/// A request to suspend programs.
#[derive(Clone, Copy, Debug)]
pub(in crate::daemon) struct Suspended {
    pub(in crate::daemon) deep: bool,
    /// Whether the daemon does it for another program.
    pub(in crate::daemon) for_another: bool,
}

impl Metrics {
    /// An image is durable, which has files of so many bytes.
    pub(in crate::daemon) fn checkpoint_done(&self, dumped: &Dumped, written: u64, took: Duration) {
        let protocol = ("protocol", dumped.protocol);
        let [outcome, kind] = end(None);
        self.checkpoints.get_or_create(&[outcome, kind, protocol]).inc();
        self.checkpoint_duration.get_or_create(&[protocol]).observe(took.as_secs_f64());
        for (name, duration, bytes) in &dumped.phases {
            let labels = [("phase", *name), protocol];
            self.checkpoint_phases.get_or_create(&labels).observe(duration.as_secs_f64());
            if *bytes > 0 {
                self.checkpoint_phase_bytes.get_or_create(&labels).inc_by(*bytes);
            }
        }
        let Content { stored, compressed, zero, base } = dumped.content;
        for (source, bytes) in [("stored", stored), ("zero", zero), ("base", base)] {
            self.checkpoint_content.get_or_create(&[("source", source)]).inc_by(bytes);
        }
        self.checkpoint_stored.inc_by(compressed);
        self.checkpoint_written.inc_by(written);
        if let Some(rate) = dumped.rate() {
            self.checkpoint_sink.0.observe(rate);
        }
    }

    /// A dump has failed, which was planned with this protocol, if it was.
    pub(in crate::daemon) fn checkpoint_failed(&self, kind: FailureKind, protocol: Option<Protocol>) {
        let [outcome, kind] = end(Some(kind));
        self.checkpoints.get_or_create(&[outcome, kind, ("protocol", families::protocol(protocol))]).inc();
    }

    /// All of a restore is loaded.
    pub(in crate::daemon) fn restore_done(&self, restored: &Restored<'_>) {
        let [outcome, kind] = end(None);
        let image = ("image", restored.source.as_str());
        self.restores.get_or_create(&[outcome, kind, image]).inc();
        self.restore_running.get_or_create(&[image]).observe(restored.running.as_secs_f64());
        self.restore_loaded.get_or_create(&[image]).observe(restored.loaded.as_secs_f64());
        for (name, spent) in restored.phases {
            self.restore_phases.get_or_create(&[("phase", *name)]).observe(spent.as_secs_f64());
        }
        for times in restored.loads {
            let LoadTimes { code_ns, replay_ns, map_ns, content_ns, hash_ns, bytes, set, copied } = *times;
            let steps =
                [("code", code_ns), ("replay", replay_ns), ("map", map_ns), ("content", content_ns), ("hash", hash_ns)];
            for (step, ns) in steps {
                let spent = Duration::from_nanos(ns).as_secs_f64();
                self.restore_steps.get_or_create(&[("step", step)]).observe(spent);
            }
            let of_image = bytes.saturating_sub(set).saturating_sub(copied);
            for (source, bytes) in [("image", of_image), ("zero", set), ("gpu", copied)] {
                self.restore_content.get_or_create(&[("source", source)]).inc_by(bytes);
            }
        }
    }

    /// A restore has failed.
    pub(in crate::daemon) fn restore_failed(&self, kind: FailureKind, source: Start) {
        let [outcome, kind] = end(Some(kind));
        self.restores.get_or_create(&[outcome, kind, ("image", source.as_str())]).inc();
    }

    /// A worker that the pool has started is ready after this time, or is not.
    pub(in crate::daemon) fn worker_started(&self, kind: &'static str, took: Option<Duration>) {
        let outcome = if took.is_some() { "ready" } else { "failed" };
        self.worker_starts.get_or_create(&[("kind", kind), ("outcome", outcome)]).inc();
        if let Some(took) = took {
            self.worker_start_duration.get_or_create(&[("kind", kind)]).observe(took.as_secs_f64());
        }
    }

    /// Somebody has asked the pool for a worker, and waited for so long.
    pub(in crate::daemon) fn worker_taken(&self, kind: &'static str, taken: Taken, waited: Duration) {
        let outcome = match taken {
            Taken::Ready => "ready",
            Taken::Waited => "waited",
            Taken::Failed => "failed",
        };
        self.workers_taken.get_or_create(&[("kind", kind), ("outcome", outcome)]).inc();
        if taken == Taken::Waited {
            self.worker_wait.get_or_create(&[("kind", kind)]).observe(waited.as_secs_f64());
        }
    }

    /// A worker has died whose program lives on.
    pub(in crate::daemon) fn worker_lost(&self) {
        self.workers_lost.inc();
    }

    /// A program has its worker.
    pub(in crate::daemon) fn attached(&self, took: Duration) {
        self.attaches.get_or_create(&[("outcome", "attached")]).inc();
        self.attach_duration.get_or_create(&[]).observe(took.as_secs_f64());
    }

    /// A program has no worker: `gone`, `refused` or `failed`.
    pub(in crate::daemon) fn not_attached(&self, outcome: &'static str) {
        self.attaches.get_or_create(&[("outcome", outcome)]).inc();
    }

    /// Programs were suspended, each in its time, with its bytes; or there was a failure.
    pub(in crate::daemon) fn suspended(
        &self,
        how: Suspended,
        result: Result<impl Iterator<Item = (Duration, u64)>, FailureKind>,
    ) {
        let depth = ("depth", if how.deep { "deep" } else { "shallow" });
        let cause = ("cause", if how.for_another { "oversubscription" } else { "request" });
        let [outcome, kind] = end(result.as_ref().err().copied());
        self.suspends.get_or_create(&[outcome, kind, depth, cause]).inc();
        for (took, bytes) in result.into_iter().flatten() {
            self.suspend_duration.get_or_create(&[depth]).observe(took.as_secs_f64());
            self.suspend_bytes.get_or_create(&[depth]).inc_by(bytes);
        }
    }

    /// Somebody has asked that programs resume.
    pub(in crate::daemon) fn resumed(&self, failure: Option<FailureKind>) {
        self.resumes.get_or_create(&end(failure)).inc();
    }

    /// A program is killed because of memory that it shares with other instances of its image.
    pub(in crate::daemon) fn shared_memory_fault(&self) {
        self.shared_faults.inc();
    }

    /// So many spans have come to this end.
    pub(in crate::daemon) fn spans(&self, end: SpanEnd, number: usize) {
        self.trace_spans.get_or_create(&[("outcome", end.as_str())]).inc_by(number as u64);
    }

    /// How many spans have come to this end.
    #[cfg(test)]
    pub(in crate::daemon) fn spans_that(&self, end: SpanEnd) -> u64 {
        self.trace_spans.get_or_create(&[("outcome", end.as_str())]).get()
    }

    /// A restored program has executed its first command, so long after the restore began.
    pub(in crate::daemon) fn first_command(&self, after: Duration) {
        self.restore_first_command.get_or_create(&[]).observe(after.as_secs_f64());
    }

    /// A connection has a place.
    pub(in crate::daemon) fn connection(&self) {
        self.connections.inc();
    }

    /// A connection has none.
    pub(in crate::daemon) fn connection_refused(&self) {
        self.connections_refused.inc();
    }

    /// A connection has said what it wants; nothing where that was not understood.
    pub(in crate::daemon) fn request(&self, request: Option<&Request>) {
        self.requests.get_or_create(&[("request", request.map_or("not_understood", name))]).inc();
    }
}

fn name(request: &Request) -> &'static str {
    match request {
        Request::Attach(_) => "attach",
        Request::Reattach { .. } => "reattach",
        Request::Rejoin { .. } => "rejoin",
        Request::Pause { .. } => "pause",
        Request::Frozen { .. } => "frozen",
        Request::Socket { .. } => "socket",
        Request::Finish => "finish",
        Request::Restore => "restore",
        Request::RestoreAllowing(_) => "restore_allowing",
        Request::Resume { .. } => "resume",
        Request::List => "list",
        Request::Status => "status",
        Request::Calls { .. } => "calls",
        Request::Access { .. } => "access",
        Request::Check { .. } => "check",
        Request::Protocol { .. } => "protocol",
        Request::Checkpoint { .. } => "checkpoint",
        Request::Together { .. } => "together",
        Request::Moment => "moment",
        Request::WatchRestore { .. } => "watch_restore",
        Request::Progress => "progress",
        Request::PreCopy { .. } => "pre_copy",
        Request::Preload => "preload",
        Request::Migrate { .. } => "migrate",
        Request::HandOver => "hand_over",
        Request::Migration { .. } => "migration",
        Request::TakeBack { .. } => "take-back",
        Request::HoldRestore { .. } => "hold_restore",
        Request::Own => "own",
        Request::Arrival { .. } => "arrival",
        Request::Grant { .. } => "grant",
        Request::Revoke { .. } => "revoke",
        Request::Suspend { .. } => "suspend",
        Request::ResumeSuspended { .. } => "resume_suspended",
        Request::Warm { .. } => "warm",
        Request::WarmImages => "warm_images",
        Request::ForgetWarm => "forget_warm",
        Request::ForgetWarmNamed { .. } => "forget_warm_named",
        Request::Register { .. } => "register",
        Request::Userfaultfd => "userfaultfd",
        Request::Import { .. } => "import",
        Request::Gpus => "gpus",
        Request::GpuMemory { .. } => "gpu_memory",
        Request::GpuProcesses { .. } => "gpu_processes",
        Request::NativeCheckpoint { .. } => "native_checkpoint",
        Request::NativeResume { .. } => "native_resume",
        Request::AreNatives => "are_natives",
        Request::GpuAsk(_) => "gpu_ask",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_images::{Allocation, Client, Compression, Extent, Phase, Piece, PieceHash, Pinned};

    #[test]
    fn content_is_what_is_stored_zero_or_in_the_base() {
        let extent = |length, compression| Extent { file: 0, offset: 0, length, compression };
        let hash = PieceHash::from_bytes([0; 16]);
        let piece = |length, storage| Piece { offset: 0, length, hash, storage };
        let pieces = vec![
            piece(100, Storage::Stored(extent(100, Compression::None))),
            piece(100, Storage::Stored(extent(30, Compression::Lz4))),
            piece(7, Storage::Zero),
            piece(5, Storage::Parent { depth: 1, extent: extent(2, Compression::Lz4) }),
        ];
        let pinned = Pinned { size: 3, pieces: vec![piece(3, Storage::Zero)], ..Pinned::default() };
        let allocations = vec![Allocation { size: 212, pieces, ..Allocation::default() }];
        let mut manifest = Manifest::new(0, Protocol::Cow);
        manifest.clients = vec![Client { allocations, pinned: vec![pinned], ..Client::default() }];
        assert_eq!(Content::of(&manifest), Content { stored: 200, compressed: 130, zero: 10, base: 5 });

        let metrics = Metrics::default();
        metrics.checkpoint_done(&Dumped::of(&manifest), 1000, Duration::from_secs(1));
        let source = |name| metrics.checkpoint_content.get_or_create(&[("source", name)]).get();
        assert_eq!([source("stored"), source("zero"), source("base")], [200, 10, 5]);
        assert_eq!((metrics.checkpoint_stored.get(), metrics.checkpoint_written.get()), (130, 1000));
        let done = [("outcome", "done"), ("kind", "none"), ("protocol", "cow")];
        assert_eq!(metrics.checkpoints.get_or_create(&done).get(), 1);
    }

    #[test]
    fn the_sink_takes_what_is_in_the_files_from_the_copys_begin_until_all_is_on_disk() {
        let phase = |name, ms: u64| Phase { name, start: 0, duration: ms * 1_000_000, bytes: 0 };
        let mut manifest = Manifest::new(0, Protocol::Cow);
        manifest.phases =
            vec![phase(PhaseName::Copy, 300), phase(PhaseName::Write, 200), phase(PhaseName::Freeze, 900)];
        let mut dumped = Dumped::of(&manifest);
        assert_eq!(dumped.rate(), None);
        dumped.content.compressed = 1_000_000;
        assert_eq!(dumped.rate(), Some(2e6));
        manifest.phases.push(phase(PhaseName::PreCopy, 100));
        assert_eq!(Dumped { content: dumped.content, ..Dumped::of(&manifest) }.rate(), None);
    }

    #[test]
    fn a_suspension_is_one_request_and_gives_back_what_all_its_programs_have() {
        let metrics = Metrics::default();
        let how = Suspended { deep: true, for_another: false };
        let programs = [(Duration::from_millis(1), 5), (Duration::from_millis(2), 6)];
        metrics.suspended(how, Ok(programs.into_iter()));
        metrics.suspended(how, Err::<std::iter::Empty<_>, _>(FailureKind::NoSpace));
        let depth = ("depth", "deep");
        let count = |[outcome, kind]: families::Labels<2>| {
            metrics.suspends.get_or_create(&[outcome, kind, depth, ("cause", "request")]).get()
        };
        assert_eq!((count(end(None)), count(end(Some(FailureKind::NoSpace)))), (1, 1));
        assert_eq!(metrics.suspend_bytes.get_or_create(&[depth]).get(), 11);
    }
}

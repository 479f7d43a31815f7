//! The counters and histograms: their names, labels, and what they mean.

use prometheus_client::encoding::{EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use rekindle_images::Protocol;
use rekindle_wire::control::FailureKind;

/// The beginning of all names.
pub(super) const PREFIX: &str = "rekindle";

/// Names and values of labels. Values are constants, so there are only so many of them.
pub(super) type Labels<const N: usize> = [(&'static str, &'static str); N];
/// Counters that differ by `N` labels.
pub(super) type Counters<const N: usize> = Family<Labels<N>, Counter>;
/// Histograms of seconds that differ by `N` labels.
pub(super) type Histograms<const N: usize> = Family<Labels<N>, Histogram, fn() -> Histogram>;

/// The bounds of durations, in seconds: from the stall of a small program to the copy of a large one to a slow disk.
const BOUNDS: [f64; 18] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];

/// The bounds of rates, in bytes a second: from a slow network's disk to host memory.
const RATES: [f64; 12] = [1e7, 2.5e7, 5e7, 1e8, 2.5e8, 5e8, 1e9, 2.5e9, 5e9, 1e10, 2.5e10, 5e10];

/// A histogram of bytes a second.
#[derive(Clone, Debug)]
pub(super) struct Rate(pub(super) Histogram);

/// The value of a label that does not apply.
pub(super) const NONE: &str = "none";
/// The protocols that a dump may have been planned with; `none`: it has failed before that.
const PROTOCOLS: [&str; 6] = ["stop", "clone", "cow", "recopy", "auto", NONE];
/// What a restore finds: nothing, the image's files in host memory, workers besides, or GPU memory too.
pub(super) const SOURCES: [&str; 5] = ["cold", "warm", "prepared", "resident", NONE];
/// The kinds of workers.
pub(super) const KINDS: [&str; 3] = ["usual", "gpus", "settings"];

/// What has become of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon) enum SpanEnd {
    Exported,
    /// The collector does not want it.
    Refused,
    /// There was no room for it, or the collector was away for too long.
    Dropped,
}

impl SpanEnd {
    pub(super) const ALL: [Self; 3] = [Self::Exported, Self::Refused, Self::Dropped];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Exported => "exported",
            Self::Refused => "refused",
            Self::Dropped => "dropped",
        }
    }
}

/// A metric without numbers as yet.
trait New {
    fn new() -> Self;
}

impl New for Counter {
    fn new() -> Self {
        Self::default()
    }
}

impl<const N: usize> New for Counters<N> {
    fn new() -> Self {
        Self::default()
    }
}

impl<const N: usize> New for Histograms<N> {
    fn new() -> Self {
        Self::new_with_constructor(|| Histogram::new(BOUNDS))
    }
}

impl New for Rate {
    fn new() -> Self {
        Self(Histogram::new(RATES))
    }
}

impl EncodeMetric for Rate {
    fn encode(&self, encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.0.encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

/// Declares the metrics: each with its type, its name without prefix and without `_total`, and its meaning.
macro_rules! families {
    ($($field:ident: $type:ty = $name:literal, $help:literal;)*) => {
        /// All counters and histograms. Clones of a metric share its numbers; whoever records takes no lock but that of a table of
        /// labels, for reading.
        #[derive(Debug)]
        pub(in crate::daemon) struct Metrics {
            $(pub(super) $field: $type,)*
        }

        impl Default for Metrics {
            fn default() -> Self {
                let metrics = Self { $($field: <$type as New>::new(),)* };
                metrics.begin();
                metrics
            }
        }

        impl Metrics {
            /// Adds all metrics to a registry.
            pub(super) fn register(&self, registry: &mut Registry) {
                $(registry.register($name, $help, self.$field.clone());)*
            }

            /// The names of all, as in a scrape, with the prefix and, for a histogram, without what its parts add.
            #[cfg(test)]
            pub(super) fn names() -> Vec<String> {
                vec![$(full_name($name, std::any::type_name::<$type>())),*]
            }
        }
    };
}

families! {
    checkpoints: Counters<3> = "checkpoint_operations", "Dumps of programs that use a GPU, by outcome, kind of failure, and protocol";
    checkpoint_duration: Histograms<1> = "checkpoint_duration_seconds",
        "Time from the request (or from the program's moment) until the image was durable, of dumps that were done";
    checkpoint_phases: Histograms<2> = "checkpoint_phase_duration_seconds",
        "Time of each phase of dumps that were done, as in `rekindle inspect`; stall: the time that the GPU side cost the program";
    checkpoint_phase_bytes: Counters<2> = "checkpoint_phase_bytes",
        "Bytes of GPU memory that a phase handled; divided by the seconds of the phase, its rate";
    checkpoint_content: Counters<1> = "checkpoint_content_bytes",
        "Content of GPU and pinned memory in images, before compression: stored there, in the image built on, or zero";
    checkpoint_stored: Counter = "checkpoint_stored_bytes", "Bytes that the stored content takes in images, after compression";
    checkpoint_written: Counter = "checkpoint_written_bytes", "Bytes of all files of images, without CRIU's";
    checkpoint_sink: Rate = "checkpoint_sink_bytes_per_second",
        "The rate at which the GPU memory of a dump got to its disk: bytes in the image's files, by the time of copy and write";
    restores: Counters<3> = "restore_operations",
        "Restores of programs that use a GPU, by outcome, kind of failure, and what was ready for the image";
    restore_running: Histograms<1> = "restore_running_duration_seconds",
        "Time from CRIU's first request until the processes run";
    restore_loaded: Histograms<1> = "restore_loaded_duration_seconds",
        "Time from CRIU's first request until all GPU memory is loaded";
    restore_first_command: Histograms<0> = "restore_first_command_duration_seconds",
        "Time from CRIU's first request until a restored program's first command for the GPU was executed, of programs that a scrape has met";
    restore_phases: Histograms<1> = "restore_phase_duration_seconds",
        "Time of each phase of a restore until the processes run";
    restore_steps: Histograms<1> = "restore_load_step_duration_seconds",
        "Time of each step of the load of one process, in its worker";
    restore_content: Counters<1> = "restore_content_bytes",
        "Content of GPU memory that restores have loaded: read from images, or set to zero";
    worker_starts: Counters<2> = "pool_worker_start_operations", "Starts of workers for the pool, by kind and outcome";
    worker_start_duration: Histograms<1> = "pool_worker_start_duration_seconds", "Time until a worker that was started was ready";
    workers_taken: Counters<2> = "pool_take_operations",
        "Workers that programs and restores asked for: one was ready, it was waited for, or there was none";
    worker_wait: Histograms<1> = "pool_take_wait_duration_seconds", "Time for which programs and restores waited for a worker";
    workers_lost: Counter = "workers_lost", "Workers that have died while their program lives on without its GPU state";
    attaches: Counters<1> = "attach_operations", "Programs that asked for a worker at their start, by outcome";
    attach_duration: Histograms<0> = "attach_duration_seconds", "Time until a program had its worker";
    suspends: Counters<4> = "suspend_operations", "Requests to suspend programs, by outcome, kind of failure, depth, and cause";
    suspend_duration: Histograms<1> = "suspend_duration_seconds", "Time until the memory of a program was given back";
    suspend_bytes: Counters<1> = "suspend_bytes", "Bytes of GPU memory that were given back";
    resumes: Counters<2> = "resume_operations",
        "Requests to resume programs, by outcome and kind of failure, without those that resumed by themselves";
    shared_faults: Counter = "shared_memory_faults",
        "Programs that were killed because they wrote, or could not use, memory that they share with other instances of an image";
    requests: Counters<1> = "requests", "Requests at the daemon's sockets, by name";
    connections: Counter = "connections_accepted", "Connections at the daemon's sockets";
    connections_refused: Counter = "connections_refused", "Connections that were closed at once, because there were too many";
    trace_spans: Counters<1> = "trace_spans",
        "Spans for OpenTelemetry: exported, refused by the collector, or dropped because the collector was away or too slow";
    scrapes: Counters<1> = "metrics_requests", "Requests for metrics, by the code of the answer";
}

impl Metrics {
    /// Makes the series whose first event an alert must see: a counter that comes into being with it shows no increase.
    fn begin(&self) {
        let ends = || std::iter::once(end(None)).chain(FailureKind::ALL.map(|kind| end(Some(kind))));
        for [outcome, kind] in ends() {
            for protocol in PROTOCOLS {
                self.checkpoints.get_or_create(&[outcome, kind, ("protocol", protocol)]).inc_by(0);
            }
            for source in SOURCES {
                self.restores.get_or_create(&[outcome, kind, ("image", source)]).inc_by(0);
            }
            self.resumes.get_or_create(&[outcome, kind]).inc_by(0);
            for (depth, cause) in [("shallow", "request"), ("deep", "request"), ("shallow", "oversubscription")] {
                self.suspends.get_or_create(&[outcome, kind, ("depth", depth), ("cause", cause)]).inc_by(0);
            }
        }
        for kind in KINDS {
            for outcome in ["ready", "failed"] {
                self.worker_starts.get_or_create(&[("kind", kind), ("outcome", outcome)]).inc_by(0);
            }
            for outcome in ["ready", "waited", "failed"] {
                self.workers_taken.get_or_create(&[("kind", kind), ("outcome", outcome)]).inc_by(0);
            }
        }
        for end in SpanEnd::ALL {
            self.trace_spans.get_or_create(&[("outcome", end.as_str())]).inc_by(0);
        }
        for outcome in ["attached", "refused", "failed", "gone"] {
            self.attaches.get_or_create(&[("outcome", outcome)]).inc_by(0);
        }
    }
}

/// The labels for how an operation has ended: the outcome, as in `--json`, and the kind of failure.
pub(super) fn end(failure: Option<FailureKind>) -> Labels<2> {
    let outcome = match failure {
        None => "done",
        Some(FailureKind::Refused | FailureKind::Version) => "refused",
        Some(_) => "failed",
    };
    [("outcome", outcome), ("kind", failure.map_or(NONE, FailureKind::as_str))]
}

/// The label's value for a protocol.
pub(super) fn protocol(protocol: Option<Protocol>) -> &'static str {
    let name = protocol.map_or(NONE, Protocol::as_str);
    PROTOCOLS.into_iter().find(|it| *it == name).unwrap_or(NONE)
}

#[cfg(test)]
fn full_name(name: &str, of_type: &str) -> String {
    // Only histograms' types name their type so.
    let suffix = if of_type.contains("Histogram") || of_type.ends_with("Rate") { "" } else { "_total" };
    format!("{}_{name}{suffix}", PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_end_and_every_protocol_has_a_series_from_the_start() {
        let metrics = Metrics::default();
        let kinds = FailureKind::ALL.map(Some).into_iter().chain([None]);
        for [outcome, kind] in kinds.map(end) {
            for name in Protocol::CHOICES.map(|it| protocol(Some(it))).into_iter().chain([protocol(None)]) {
                let series = metrics.checkpoints.get(&[outcome, kind, ("protocol", name)]);
                assert!(series.is_some(), "{kind:?} {name}");
            }
        }
        assert_eq!(end(Some(FailureKind::Version))[0].1, "refused");
        assert_eq!(protocol(Some(Protocol::Unknown)), NONE);
        assert!(Protocol::CHOICES.iter().all(|it| protocol(Some(*it)) != NONE));
    }
}

//! Spans of dumps and restores, for OpenTelemetry's tools: one trace shows the phases of one operation in the command, the daemon
//! and the workers.
//!
//! ```text
//!   rekindle checkpoint (its own span, in its order) ┐
//!   CRIU's environment (TRACEPARENT, in `Pause`) ────┤ parent
//!                                                    ▼
//!   dumps, restores ── times, when they are over ── Batch (`span`) ──► queue ──► `export` ── OTLP (`otlp`) ── HTTP (`post`)
//! ```
//!
//! All spans are made here, those of commands and workers too: they tell the daemon their times or the daemon sees them, and all
//! run on one clock. So only the daemon needs to reach a collector. Nobody waits for one: the queue is bounded, and what does not
//! fit is dropped and counted in the metrics.
//!
//! OpenTelemetry's own crates are not used. To send a batch over HTTP, `opentelemetry`, `opentelemetry_sdk` and
//! `opentelemetry-otlp` 0.33, without default features, bring some thirty more crates (prost, http, futures-executor and rand
//! among them) and still need an HTTP client besides; the encoding in JSON is all that is needed of them.

mod export;
mod otlp;
mod post;
mod span;

use std::sync::Arc;
use std::time::Duration;

use rekindle_wire::control::TraceParent;
use tracing::warn;

use self::export::Exporter;
pub(super) use self::span::{Batch, Program, Span};
use super::metrics::Metrics;
use super::sys;
use crate::config::TracingConfig;

/// Where spans go, if they go anywhere.
#[derive(Debug, Default)]
pub(super) struct Spans(Option<Exporter>);

impl Spans {
    /// Starts the export, if there is a collector.
    ///
    /// # Errors
    /// There is no thread for it.
    pub(super) fn start(config: &TracingConfig, metrics: &Arc<Metrics>) -> std::io::Result<Self> {
        if let Some(why) = &config.ignored {
            warn!("no spans are exported: {why}");
        }
        let exporter = config.collector.clone().map(|it| Exporter::start(it, Arc::clone(metrics)));
        Ok(Self(exporter.transpose()?))
    }

    /// The place of a new operation in a trace: below this span, or in a trace of its own. None if nobody wants its spans.
    pub(super) fn begin(&self, parent: Option<TraceParent>) -> Option<TraceParent> {
        self.0.as_ref()?;
        let number = sys::random().ok()?;
        match parent {
            Some(parent) => parent.sampled.then(|| parent.another(number)),
            None => {
                let trace = u128::from(sys::random().ok()?) << 64 | u128::from(sys::random().ok()?);
                Some(TraceParent::first(trace, number))
            }
        }
    }

    /// Hands over the spans of an operation that is over. Never waits.
    pub(super) fn send(&self, batch: Batch) {
        if let Some(exporter) = &self.0 {
            exporter.send(batch.into_spans());
        }
    }

    /// Exports what is there, as far as that is possible in so much time.
    pub(super) fn end(&self, limit: Duration) {
        if let Some(exporter) = &self.0 {
            exporter.end(limit);
        }
    }
}

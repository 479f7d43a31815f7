//! The queue of spans that are over, and the thread that sends them.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use tracing::{debug, info, warn};

use super::super::metrics::{Metrics, SpanEnd};
use super::super::{lock, thread, wait, wait_timeout};
use super::otlp;
use super::post::{PostError, post};
use super::span::Span;
use crate::config::Collector;

/// The most spans that wait: those of a hundred dumps.
const MOST: usize = 2048;
/// The most spans of one request.
const AT_ONCE: usize = 512;
/// How long a collector may take for one request.
const LIMIT: Duration = Duration::from_secs(10);
/// The pauses before a batch is sent again. After the last one it is given up.
const PAUSES: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(4), Duration::from_secs(8)];

/// Sends spans to a collector, in the background.
#[derive(Debug)]
pub(super) struct Exporter(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    collector: Collector,
    queue: Mutex<Queue>,
    changed: Condvar,
    metrics: Arc<Metrics>,
}

#[derive(Debug, Default)]
struct Queue {
    spans: VecDeque<Span>,
    /// Nothing comes any more, and nothing is tried twice.
    closing: bool,
    /// The thread has ended.
    over: bool,
}

impl Exporter {
    pub(super) fn start(collector: Collector, metrics: Arc<Metrics>) -> io::Result<Self> {
        info!(host = collector.host, port = collector.port, path = collector.path, "spans are exported");
        let shared = Arc::new(Shared { collector, queue: Mutex::default(), changed: Condvar::new(), metrics });
        let of_thread = Arc::clone(&shared);
        thread("spans", move || of_thread.run())?;
        Ok(Self(shared))
    }

    /// Adds spans, as many as there is room for.
    pub(super) fn send(&self, mut spans: Vec<Span>) {
        let mut queue = lock(&self.0.queue);
        let room = if queue.closing { 0 } else { MOST.saturating_sub(queue.spans.len()) };
        let dropped = spans.len().saturating_sub(room);
        spans.truncate(room);
        queue.spans.extend(spans);
        drop(queue);
        self.0.changed.notify_all();
        self.0.metrics.spans(SpanEnd::Dropped, dropped);
    }

    /// Waits until all is sent, or the time is over.
    pub(super) fn end(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut queue = lock(&self.0.queue);
        queue.closing = true;
        self.0.changed.notify_all();
        while !queue.over
            && let Some(left) = deadline.checked_duration_since(Instant::now())
        {
            queue = wait_timeout(&self.0.changed, queue, left);
        }
    }
}

impl Shared {
    fn run(&self) {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let mut works = true;
        while let Some(batch) = self.next() {
            let sent = self.send(&otlp::encode(&batch, host.trim_end()));
            let end = match &sent {
                Ok(()) => SpanEnd::Exported,
                Err(error) if error.is_passing() => SpanEnd::Dropped,
                Err(_) => SpanEnd::Refused,
            };
            self.metrics.spans(end, batch.len());
            match sent {
                Ok(()) if !works => info!("the collector takes spans again"),
                Err(error) if works => warn!(spans = batch.len(), "the collector does not take spans: {error}"),
                Err(error) => debug!(spans = batch.len(), "the collector does not take spans: {error}"),
                Ok(()) => {}
            }
            works = end == SpanEnd::Exported;
        }
        lock(&self.queue).over = true;
        self.changed.notify_all();
    }

    /// Waits for spans; none when the export has ended.
    fn next(&self) -> Option<Vec<Span>> {
        let mut queue = lock(&self.queue);
        while queue.spans.is_empty() {
            if queue.closing {
                return None;
            }
            queue = wait(&self.changed, queue);
        }
        let some = queue.spans.len().min(AT_ONCE);
        Some(queue.spans.drain(..some).collect())
    }

    fn send(&self, body: &[u8]) -> Result<(), PostError> {
        let mut pauses = PAUSES.iter();
        loop {
            match (post(&self.collector, body, LIMIT), pauses.next()) {
                (Err(error), Some(pause)) if error.is_passing() => {
                    debug!("the collector does not take spans, which are sent again: {error}");
                    if !self.pause(*pause) {
                        return Err(error);
                    }
                }
                (result, _) => return result,
            }
        }
    }

    /// Waits so long; false if the export ends meanwhile.
    fn pause(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        let mut queue = lock(&self.queue);
        while !queue.closing
            && let Some(left) = deadline.checked_duration_since(Instant::now())
        {
            queue = wait_timeout(&self.changed, queue, left);
        }
        !queue.closing
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use rekindle_wire::control::TraceParent;

    use super::super::span::Program;
    use super::*;

    fn spans(number: usize) -> Vec<Span> {
        let place = TraceParent::first(1, 2);
        let (attributes, failure) = (Vec::new(), None);
        let span =
            Span { program: Program::Daemon, place, parent: None, name: "x", start: 1, end: 2, attributes, failure };
        vec![span; number]
    }

    #[test]
    fn without_a_collector_spans_are_dropped_and_counted_and_nobody_waits() {
        // Nobody accepts at this port.
        let place = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = place.local_addr().unwrap().port();
        let metrics = Arc::<Metrics>::default();
        let (host, path) = ("127.0.0.1".to_owned(), "/".to_owned());
        let collector = Collector { host, port, path, headers: Vec::new() };
        let exporter = Exporter::start(collector, Arc::clone(&metrics)).unwrap();
        exporter.send(spans(MOST + 10));
        let first = metrics.spans_that(SpanEnd::Dropped);
        assert!(first >= 10, "{first}");
        exporter.send(spans(MOST));
        assert!(metrics.spans_that(SpanEnd::Dropped) >= MOST as u64 - AT_ONCE as u64);
        drop(place);
        exporter.end(Duration::from_secs(60));
        exporter.send(spans(1));
        assert_eq!(metrics.spans_that(SpanEnd::Dropped), 2 * MOST as u64 + 11);
        assert_eq!(metrics.spans_that(SpanEnd::Exported), 0);
    }
}

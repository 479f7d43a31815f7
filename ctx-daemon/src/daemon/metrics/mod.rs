//! What the daemon measures, for Prometheus: `GET /metrics` over HTTP.
//!
//! ```text
//!   dumps, restores, pool, ... ── record ──► Metrics (`families`): counters and histograms ──┐
//!                                                                                            ├── `serve` ──► HTTP (`http`)
//!   the daemon's state ── read at each scrape ──► Gauges (`gauges`) ─────────────────────────┘
//! ```
//!
//! A number is recorded when what it measures is over, and never while a program stands still for a dump: the phases of a dump
//! are measured anyway, and are recorded when its image is durable. All labels of recorded numbers are constants of this program,
//! so no client can make more series than there are. Gauges that name a client are read from the registry of clients, and end
//! with the client.
//!
//! A scrape locks what `rekindle ps` locks, and asks workers of running clients only; it waits for all of them together no longer
//! than [`super::worker::describe_at_a_glance`] does.

mod families;
mod gauges;
mod http;
mod record;
mod serve;

pub(super) use self::families::{Metrics, SpanEnd};
pub(super) use self::record::{Dumped, Restored, Start, Suspended, Taken};
pub(crate) use self::serve::MetricsError;
pub(super) use self::serve::{Listeners, serve};

//! Checkpoints: orders for dumps, and dumps that go on.
//!
//! ```text
//!   rekindle checkpoint ── Checkpoint ────► an order ──────────────┐ options
//!                                             ▲ progress, result   ▼
//!   CRIU's plugin ───────── Pause ────────► a dump ── Progress ── (dump/)
//! ```
//!
//! This file keeps orders and dumps; `orders` serves an order, and `moment` waits for the application's moment.
//!
//! An order lasts as long as its connection, so it ends when the command is killed. A dump does not need an order: `criu dump`
//! and `podman container checkpoint` dump without one.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rekindle_images::Protocol;
use rekindle_wire::control::{CommandSpan, DumpInfo, DumpOutcome, TraceParent};
use thiserror::Error;

use super::clients::Client;
use super::dump::{Present, Progress};
use super::metrics::Metrics;
use super::party::Party;
use super::spans::{Batch, Span, Spans};
use super::{lock, process};

/// The most orders of one user or container at a time.
const MOST_ORDERS: usize = 16;
/// The pause between two checks whether the moment has come.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How long a process that announces its moment is kept waiting until it is quiesced.
const REST: Duration = Duration::from_secs(1);

/// All orders and dumps.
pub(crate) struct Checkpoints {
    inner: Mutex<Inner>,
    metrics: Arc<Metrics>,
    spans: Arc<Spans>,
}

#[derive(Default)]
struct Inner {
    orders: Vec<Order>,
    dumps: Vec<Arc<Progress>>,
    next: u64,
}

/// The announcement that a tree is about to be dumped, or its dump.
struct Order {
    number: u64,
    /// The party that made the order.
    party: Party,
    root: i32,
    protocol: Option<Protocol>,
    moment: Option<Moment>,
    /// The process of the command, and its span, if it has one.
    command: Option<(i32, CommandSpan)>,
    /// The last dump of the tree since then.
    dump: Option<Arc<Progress>>,
}

/// The application's moment, at which a dump begins.
#[derive(Clone, Copy)]
pub(super) struct Moment {
    /// How long a dump waits for the moment.
    pub(super) timeout: Duration,
    pub(super) has_come: bool,
}

/// The user or container has as many orders as it may have.
#[derive(Debug, Error)]
#[error("{0} has {MOST_ORDERS} checkpoints under way already: wait for one of them, or end its command")]
pub(super) struct TooManyOrders(Party);

impl Checkpoints {
    /// No orders and no dumps yet.
    pub(crate) fn new(metrics: Arc<Metrics>, spans: Arc<Spans>) -> Self {
        Self { inner: Mutex::default(), metrics, spans }
    }

    /// The dumps of programs that use a GPU which go on.
    pub(crate) fn in_progress(&self) -> Vec<Present> {
        let dumps = lock(&self.inner).dumps.clone();
        dumps.iter().filter_map(|it| it.present()).collect()
    }

    /// The number of orders.
    pub(crate) fn orders(&self) -> usize {
        lock(&self.inner).orders.len()
    }

    /// The protocol that is ordered for a process or for one of its ancestors.
    pub(crate) fn protocol_of(&self, pid: i32) -> Option<Protocol> {
        if lock(&self.inner).orders.iter().all(|it| it.protocol.is_none()) {
            return None;
        }
        let above = process::ancestry(pid);
        let inner = lock(&self.inner);
        let mut found = inner.orders.iter().rev().filter(|it| above.contains(&it.root));
        found.find_map(|it| it.protocol)
    }

    /// The dump of a client that goes on.
    pub(crate) fn of_client(&self, client: &Client) -> Option<DumpInfo> {
        let dumps = lock(&self.inner).dumps.clone();
        dumps.iter().find(|it| it.has(client.process.pid)).map(|it| it.info())
    }

    /// A dump of this tree begins; the dump is over when the result is dropped. Its spans belong to the command that has ordered it,
    /// or else to this span.
    pub(crate) fn begin(&self, root: i32, traceparent: Option<TraceParent>) -> DumpGuard<'_> {
        let mut inner = lock(&self.inner);
        let ordered = inner.orders.iter().rev().filter(|it| it.root == root).find_map(|it| it.command);
        let parent = ordered.map(|(_, it)| it.span).or(traceparent);
        let progress = Arc::new(Progress::new(Arc::clone(&self.metrics), Arc::clone(&self.spans), parent));
        inner.dumps.push(Arc::clone(&progress));
        for order in inner.orders.iter_mut().filter(|it| it.root == root) {
            order.dump = Some(Arc::clone(&progress));
        }
        DumpGuard { checkpoints: self, progress, root }
    }

    /// The memory of this tree is copied while it runs: no checkpoint by itself, so neither the metrics nor spans hear of it.
    pub(crate) fn begin_pre_copy(&self, root: i32) -> DumpGuard<'_> {
        let progress = Arc::<Progress>::default();
        lock(&self.inner).dumps.push(Arc::clone(&progress));
        DumpGuard { checkpoints: self, progress, root }
    }

    /// A client has announced its moment. Returns whether a dump has waited for the moment; in that case the call returns when
    /// the client is at rest, or a little later.
    pub(crate) fn moment_has_come(&self, pid: i32) -> bool {
        let above = process::ancestry(pid);
        let dumps: Vec<_> = {
            let mut inner = lock(&self.inner);
            // Only dumps for which CRIU has come. A dump that begins later waits for the next moment.
            let here = inner.orders.iter_mut().filter(|it| above.contains(&it.root));
            here.filter_map(|it| {
                let (moment, dump) = (it.moment.as_mut()?, it.dump.as_ref()?);
                (!moment.has_come && dump.is_awaiting()).then(|| {
                    moment.has_come = true;
                    Arc::clone(dump)
                })
            })
            .collect()
        };
        let asked = Instant::now();
        while dumps.iter().any(|it| !it.is_at_rest()) && asked.elapsed() < REST {
            std::thread::sleep(POLL_INTERVAL);
        }
        !dumps.is_empty()
    }

    /// Makes the dump wait for the next moment.
    pub(super) fn wait_again(&self, dump: &DumpGuard<'_>) {
        let mut inner = lock(&self.inner);
        let of_it = |order: &&mut Order| order.dump.as_ref().is_some_and(|it| Arc::ptr_eq(it, &dump.progress));
        inner.orders.iter_mut().filter(of_it).filter_map(|it| it.moment.as_mut()).for_each(|it| it.has_come = false);
    }

    /// The moment that a dump of this tree waits for, if any.
    pub(super) fn moment(&self, dump: &DumpGuard<'_>) -> Option<Moment> {
        let inner = lock(&self.inner);
        let of_it = |order: &&Order| order.dump.as_ref().is_some_and(|it| Arc::ptr_eq(it, &dump.progress));
        inner.orders.iter().filter(of_it).find_map(|it| it.moment)
    }

    /// Notes an order for a tree, until the result is dropped.
    pub(super) fn order(
        &self,
        party: Party,
        root: i32,
        protocol: Option<Protocol>,
        timeout: Option<Duration>,
        command: Option<(i32, CommandSpan)>,
    ) -> Result<OrderGuard<'_>, TooManyOrders> {
        let mut inner = lock(&self.inner);
        let of_party = inner.orders.iter().filter(|it| it.party == party).count();
        if party != Party::Operator && of_party >= MOST_ORDERS {
            return Err(TooManyOrders(party));
        }
        inner.next += 1;
        let number = inner.next;
        let moment = timeout.map(|timeout| Moment { timeout, has_come: false });
        inner.orders.push(Order { number, party, root, protocol, moment, command, dump: None });
        Ok(OrderGuard { checkpoints: self, number })
    }
}

/// Keeps a dump registered until it is dropped.
pub(crate) struct DumpGuard<'a> {
    checkpoints: &'a Checkpoints,
    pub(crate) progress: Arc<Progress>,
    pub(super) root: i32,
}

impl Drop for DumpGuard<'_> {
    fn drop(&mut self) {
        self.progress.end();
        lock(&self.checkpoints.inner).dumps.retain(|it| !Arc::ptr_eq(it, &self.progress));
    }
}

/// Keeps an order registered until it is dropped.
pub(super) struct OrderGuard<'a> {
    checkpoints: &'a Checkpoints,
    number: u64,
}

impl OrderGuard<'_> {
    /// The progress of the dump that the order is about.
    pub(super) fn progress(&self) -> Option<DumpInfo> {
        let inner = lock(&self.checkpoints.inner);
        let dump = inner.orders.iter().find(|it| it.number == self.number)?.dump.clone()?;
        drop(inner);
        dump.is_of_clients().then(|| dump.info())
    }
}

impl Drop for OrderGuard<'_> {
    fn drop(&mut self) {
        let mut inner = lock(&self.checkpoints.inner);
        let at = inner.orders.iter().position(|it| it.number == self.number);
        let order = at.map(|at| inner.orders.remove(at));
        drop(inner);
        if let Some((pid, command)) = order.as_ref().and_then(|it| it.command).filter(|it| it.1.span.sampled) {
            let outcome = order.and_then(|it| it.dump).and_then(|it| it.info().outcome);
            let mut batch = Batch::new();
            let mut span = Span::of_command("rekindle checkpoint", pid, &command, batch.at(Instant::now()));
            if let Some(DumpOutcome::Failed(failure)) = outcome {
                span.set("error.type", failure.kind.as_str()).failure = Some(failure.reason);
            }
            batch.push(span);
            self.checkpoints.spans.send(batch);
        }
    }
}

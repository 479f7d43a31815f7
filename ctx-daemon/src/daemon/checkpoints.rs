//! Checkpoints: those that are ordered, and dumps that go on.
//!
//! ```text
//!   who has CRIU make one ── Checkpoint ──► an order ──────────────┐ how
//!                                             ▲ what became of it  ▼
//!   CRIU's plugin ───────── Pause ────────► a dump ── Progress ── (dump/)
//! ```
//!
//! An order lasts as long as its connection, so that nothing of it is left behind when its maker is killed. A dump does not
//! need one: `criu dump` and `podman container checkpoint` come without.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rekindle_images::{Protocol, UnknownProtocol};
use rekindle_wire::control::{DumpInfo, Failing, Failure, FailureKind, Reply, Request, WorkerRequest};
use rekindle_wire::frame::{self, FrameError};
use thiserror::Error;
use tracing::debug;

use super::clients::Client;
use super::connection::{self, MAX_REQUEST};
use super::dump::Progress;
use super::party::Party;
use super::pidns::{PidError, PidView};
use super::sys::Credentials;
use super::worker::WorkerError;
use super::{Daemon, at_once, lock, process, sys};
use crate::limit::Limit;

/// Orders of one user or container at a time.
const MOST_ORDERS: usize = 16;
/// For how long a dump may wait for its application's moment: as long as it waits, no process of its tree gets a worker.
const MOST_PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);
/// How often it is looked whether the moment has come.
const GLANCE: Duration = Duration::from_millis(1);
/// How long who says that it has is kept until it is at rest.
const REST: Duration = Duration::from_secs(1);

/// All of them.
#[derive(Default)]
pub(crate) struct Checkpoints {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    orders: Vec<Order>,
    dumps: Vec<Arc<Progress>>,
    next: u64,
}

/// Somebody is about to have a tree dumped, or does.
struct Order {
    number: u64,
    /// Whose it is.
    party: Party,
    root: i32,
    protocol: Option<Protocol>,
    moment: Option<Moment>,
    /// The last one of the tree since then.
    dump: Option<Arc<Progress>>,
}

/// When the application says so, a dump begins.
#[derive(Clone, Copy)]
struct Moment {
    /// For how long it is waited for.
    patience: Duration,
    has_come: bool,
}

/// Why a dump does not begin at a moment of the application's.
#[derive(Debug, Error)]
pub(crate) enum MomentError {
    #[error(
        "none of its processes has said within {0} s that it is where it wants to be checkpointed (rekindle_checkpoint)"
    )]
    Never(u64),
    #[error("whoever waited for the application's moment is gone")]
    Gone,
    #[error("{client} cannot be told that its moment is waited for: {source}")]
    Untold { client: String, source: WorkerError },
}

impl Failing for MomentError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Never(_) => FailureKind::Timeout,
            Self::Gone => FailureKind::GivenUp,
            Self::Untold { source, .. } => source.kind(),
        }
    }
}

/// Why nobody may have a tree dumped in this way.
#[derive(Debug, Error)]
enum OrderError {
    #[error("there is no process {0} of yours")]
    NoProcess(i32),
    #[error(transparent)]
    Pid(#[from] PidError),
    #[error(transparent)]
    Protocol(#[from] UnknownProtocol),
    #[error("{0} has {MOST_ORDERS} checkpoints under way already: wait for one of them, or end its command")]
    TooMany(Party),
    #[error(
        "only root and the user that rekindled runs as, on the host itself, may have a dump wait for the application's moment: dumps are theirs to make"
    )]
    MomentNotAllowed,
    #[error("a dump waits for the application's moment for {} s at most", MOST_PATIENCE.as_secs())]
    Patience,
}

impl Failing for OrderError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Pid(error) => error.kind(),
            _ => FailureKind::Refused,
        }
    }
}

impl Checkpoints {
    /// The protocol that is ordered for a process, or for one that it is below.
    pub(crate) fn protocol_of(&self, pid: i32) -> Option<Protocol> {
        if lock(&self.inner).orders.iter().all(|it| it.protocol.is_none()) {
            return None;
        }
        let above = process::ancestry(pid);
        let inner = lock(&self.inner);
        let mut found = inner.orders.iter().rev().filter(|it| above.contains(&it.root));
        found.find_map(|it| it.protocol)
    }

    /// The dump that goes on of a client.
    pub(crate) fn of_client(&self, client: &Client) -> Option<DumpInfo> {
        let dumps = lock(&self.inner).dumps.clone();
        dumps.iter().find(|it| it.has(client.process.pid)).map(|it| it.info())
    }

    /// A dump of this tree begins; it is over when the result is dropped.
    pub(crate) fn begin(&self, root: i32) -> DumpGuard<'_> {
        let progress = Arc::<Progress>::default();
        let mut inner = lock(&self.inner);
        inner.dumps.push(Arc::clone(&progress));
        for order in inner.orders.iter_mut().filter(|it| it.root == root) {
            order.dump = Some(Arc::clone(&progress));
        }
        DumpGuard { checkpoints: self, progress, root }
    }

    /// A client is where it wants to be checkpointed: returns whether somebody has waited for that, and then when it is at
    /// rest, or a little later.
    pub(crate) fn moment_has_come(&self, pid: i32) -> bool {
        let above = process::ancestry(pid);
        let dumps: Vec<_> = {
            let mut inner = lock(&self.inner);
            // Of those for which CRIU has come. One that is to be made yet waits for the next.
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
            std::thread::sleep(GLANCE);
        }
        !dumps.is_empty()
    }

    /// From now on the next moment counts.
    fn wait_again(&self, dump: &DumpGuard<'_>) {
        let mut inner = lock(&self.inner);
        let of_it = |order: &&mut Order| order.dump.as_ref().is_some_and(|it| Arc::ptr_eq(it, &dump.progress));
        inner.orders.iter_mut().filter(of_it).filter_map(|it| it.moment.as_mut()).for_each(|it| it.has_come = false);
    }

    /// The moment that a dump of this tree waits for, if it does.
    fn moment(&self, dump: &DumpGuard<'_>) -> Option<Moment> {
        let inner = lock(&self.inner);
        let of_it = |order: &&Order| order.dump.as_ref().is_some_and(|it| Arc::ptr_eq(it, &dump.progress));
        inner.orders.iter().filter(of_it).find_map(|it| it.moment)
    }

    fn order(
        &self,
        party: Party,
        root: i32,
        protocol: Option<Protocol>,
        patience: Option<Duration>,
    ) -> Result<OrderGuard<'_>, OrderError> {
        let mut inner = lock(&self.inner);
        let of_party = inner.orders.iter().filter(|it| it.party == party).count();
        if party != Party::Operator && of_party >= MOST_ORDERS {
            return Err(OrderError::TooMany(party));
        }
        inner.next += 1;
        let number = inner.next;
        let moment = patience.map(|patience| Moment { patience, has_come: false });
        inner.orders.push(Order { number, party, root, protocol, moment, dump: None });
        Ok(OrderGuard { checkpoints: self, number })
    }
}

/// A dump that goes on.
pub(crate) struct DumpGuard<'a> {
    checkpoints: &'a Checkpoints,
    pub(crate) progress: Arc<Progress>,
    root: i32,
}

/// What is said of a checkpoint beforehand.
pub(crate) struct Asked {
    pub(crate) root: i32,
    pub(crate) protocol: Option<String>,
    /// For how long the application's moment is waited for, if it is.
    pub(crate) patience: Option<Duration>,
}

/// Waits until the application says that the moment has come, where that is ordered for this dump. One that copies memory
/// beforehand waits twice: its image is of the moment after that copy. CRIU waits for the answer
/// to its first question, and the processes run.
pub(crate) fn wait_for_moment(daemon: &Daemon, stream: &UnixStream, dump: &DumpGuard<'_>) -> Result<(), MomentError> {
    let Some(Moment { patience, .. }) = daemon.checkpoints.moment(dump) else { return Ok(()) };
    daemon.checkpoints.wait_again(dump);
    let mut told = Told { clients: Vec::new(), limit: daemon.config.quiesce_timeout };
    let began = Instant::now();
    let waited = loop {
        let tree = process::tree(dump.root).unwrap_or_default();
        if let Err(error) = told.tell(daemon.registry.clients_among(&tree)) {
            break Err(error);
        }
        let pids: Vec<_> = told.clients.iter().map(|it| it.process.pid).collect();
        dump.progress.waits(true, &pids);
        match daemon.checkpoints.moment(dump) {
            None => break Err(MomentError::Gone),
            Some(moment) if moment.has_come => break Ok(()),
            Some(_) if sys::is_hung_up(stream) => break Err(MomentError::Gone),
            Some(_) if began.elapsed() >= patience => break Err(MomentError::Never(patience.as_secs())),
            Some(_) => std::thread::sleep(GLANCE),
        }
    };
    let pids: Vec<_> = told.clients.iter().map(|it| it.process.pid).collect();
    dump.progress.waits(false, &pids);
    waited
}

/// Clients that have been told that somebody waits. When this is dropped, nobody does.
struct Told {
    clients: Vec<Arc<Client>>,
    /// How long a worker may take to hear of it.
    limit: Limit,
}

impl Told {
    /// Tells those that do not know yet. One that ends meanwhile need not know.
    fn tell(&mut self, clients: Vec<Arc<Client>>) -> Result<(), MomentError> {
        for client in clients {
            if self.clients.iter().any(|it| Arc::ptr_eq(it, &client)) {
                continue;
            }
            let asked = client.worker.ask(&WorkerRequest::Moment { awaited: true }, &[], self.limit);
            match asked.map_err(|error| client.explain(error)) {
                Ok(()) => self.clients.push(client),
                Err(WorkerError::Ended) => {}
                Err(source) => return Err(MomentError::Untold { client: client.to_string(), source }),
            }
        }
        Ok(())
    }
}

impl Drop for Told {
    /// One that cannot be told asks the daemon, in vain, until the next dump that waits for its moment is over.
    fn drop(&mut self) {
        let nobody_waits = WorkerRequest::Moment { awaited: false };
        let deadline = self.limit.begins();
        at_once(&self.clients, |client| {
            if let Err(error) = client.worker.ask(&nobody_waits, &[], deadline) {
                debug!(%client, %error, "cannot be told that its moment is not waited for any more");
            }
        });
    }
}

impl Drop for DumpGuard<'_> {
    fn drop(&mut self) {
        self.progress.end();
        lock(&self.checkpoints.inner).dumps.retain(|it| !Arc::ptr_eq(it, &self.progress));
    }
}

struct OrderGuard<'a> {
    checkpoints: &'a Checkpoints,
    number: u64,
}

impl OrderGuard<'_> {
    fn progress(&self) -> Option<DumpInfo> {
        let inner = lock(&self.checkpoints.inner);
        let dump = inner.orders.iter().find(|it| it.number == self.number)?.dump.clone()?;
        drop(inner);
        dump.is_of_clients().then(|| dump.info())
    }
}

impl Drop for OrderGuard<'_> {
    fn drop(&mut self) {
        lock(&self.checkpoints.inner).orders.retain(|it| it.number != self.number);
    }
}

/// Serves an order until its connection closes.
pub(crate) fn serve(daemon: &Daemon, stream: &UnixStream, peer: (Credentials, Party), asked: &Asked) {
    let _session = match daemon.connections.session(stream) {
        Ok(session) => session,
        Err(error) => return connection::fail(stream, error),
    };
    let order = match accept(daemon, peer, asked) {
        Ok(order) => order,
        Err(error) => return connection::fail(stream, error),
    };
    connection::reply(stream, &Reply::Awaited);
    loop {
        match frame::receive_at_most::<Request>(stream, MAX_REQUEST, 0) {
            Ok(message) if matches!(message.body, Request::Progress) => {
                connection::reply(stream, &Reply::Progress(order.progress()));
            }
            Ok(_) => return connection::fail(stream, Failure::internal("only Progress can be asked now")),
            Err(FrameError::Closed) => return,
            Err(error) => return debug!(%error, "an order's connection closes"),
        }
    }
}

fn accept<'a>(
    daemon: &'a Daemon,
    (peer, party): (Credentials, Party),
    asked: &Asked,
) -> Result<OrderGuard<'a>, OrderError> {
    let ours = PidView::of(peer.pid)?.to_ours(asked.root)?;
    let owner = process::user(ours);
    if owner.is_none() || !connection::is_operator(peer) && owner != Some(peer.uid) {
        return Err(OrderError::NoProcess(asked.root));
    }
    let protocol = asked.protocol.as_deref().map(str::parse).transpose()?;
    match asked.patience {
        // It is somebody else's dump that would wait.
        Some(_) if !connection::may_checkpoint(peer) => return Err(OrderError::MomentNotAllowed),
        Some(patience) if patience > MOST_PATIENCE => return Err(OrderError::Patience),
        _ => {}
    }
    daemon.checkpoints.order(party, ours, protocol, asked.patience)
}

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

use rekindle_images::{Protocol, UnknownProtocol};
use rekindle_wire::control::{DumpInfo, Reply, Request};
use rekindle_wire::frame::{self, FrameError};
use tracing::debug;

use super::clients::Client;
use super::connection::{self, MAX_REQUEST};
use super::dump::Progress;
use super::pidns::PidView;
use super::sys::Credentials;
use super::{Daemon, lock, process};

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
    root: i32,
    protocol: Option<Protocol>,
    /// The last one of the tree since then.
    dump: Option<Arc<Progress>>,
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
        DumpGuard { checkpoints: self, progress }
    }

    fn order(&self, root: i32, protocol: Option<Protocol>) -> OrderGuard<'_> {
        let mut inner = lock(&self.inner);
        inner.next += 1;
        let number = inner.next;
        inner.orders.push(Order { number, root, protocol, dump: None });
        OrderGuard { checkpoints: self, number }
    }
}

/// A dump that goes on.
pub(crate) struct DumpGuard<'a> {
    checkpoints: &'a Checkpoints,
    pub(crate) progress: Arc<Progress>,
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
pub(crate) fn serve(daemon: &Daemon, stream: &UnixStream, peer: Credentials, root: i32, protocol: Option<&str>) {
    let _session = match daemon.connections.session(stream) {
        Ok(session) => session,
        Err(error) => return connection::fail(stream, error.to_string()),
    };
    let order = match accept(daemon, peer, root, protocol) {
        Ok(order) => order,
        Err(reason) => return connection::fail(stream, reason),
    };
    connection::reply(stream, &Reply::Awaited);
    loop {
        match frame::receive_at_most::<Request>(stream, MAX_REQUEST, 0) {
            Ok(message) if matches!(message.body, Request::Progress) => {
                connection::reply(stream, &Reply::Progress(order.progress()));
            }
            Ok(_) => return connection::fail(stream, "only Progress can be asked now".to_owned()),
            Err(FrameError::Closed) => return,
            Err(error) => return debug!(%error, "an order's connection closes"),
        }
    }
}

fn accept<'a>(
    daemon: &'a Daemon,
    peer: Credentials,
    root: i32,
    protocol: Option<&str>,
) -> Result<OrderGuard<'a>, String> {
    let ours = PidView::of(peer.pid).and_then(|it| it.to_ours(root)).map_err(|error| error.to_string())?;
    let owner = process::user(ours);
    if owner.is_none() || !connection::is_operator(peer) && owner != Some(peer.uid) {
        return Err(format!("there is no process {root} of yours"));
    }
    let protocol = protocol.map(str::parse).transpose();
    Ok(daemon.checkpoints.order(ours, protocol.map_err(|error: UnknownProtocol| error.to_string())?))
}

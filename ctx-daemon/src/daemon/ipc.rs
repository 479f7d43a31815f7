//! Memory that processes share: who may share with whom, taking it from worker to worker, and what that means for a dump.
//!
//! ```text
//!   Import{token} ─► who is it? ─► the workers of those it may share with: Export ─► its own worker: Import ─► Imported
//!                        │
//!                        └ while its tree, or that of whose memory it is, is being dumped: wait
//! ```
//!
//! The daemon keeps none of this: workers know the names and their clients' memory, so a restarted daemon finds everything
//! again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use rekindle_wire::control::{Failing, FailureKind, Reply};
use rekindle_wire::ipc::{PieceId, Token};
use tracing::{debug, warn};

use super::clients::{Client, ClientState};
use super::grants::Allowed;
use super::imports::Unfinished;
use super::process::{self, Process};
use super::worker::WorkerError;
use super::{Daemon, at_once, sys};
use crate::limit::Deadline;

/// The interval at which the daemon checks whether a dump is over.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Why memory is not shared.
#[derive(Debug, thiserror::Error)]
enum ImportError {
    #[error("this process has no worker")]
    NoClient,
    #[error("the daemon is stopping")]
    Stopping,
    #[error("the worker: {0}")]
    Worker(#[from] WorkerError),
    #[error("cannot make a ticket for the memory: {0}")]
    Ticket(std::io::Error),
}

impl Failing for ImportError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::NoClient => FailureKind::Refused,
            Self::Stopping => FailureKind::LostPeer,
            Self::Worker(error) => error.kind(),
            Self::Ticket(error) => Failing::kind(error),
        }
    }
}

/// Has a process's worker get memory of another process.
pub(crate) fn import(daemon: &Daemon, process: Process, token: &Token) -> Reply {
    match try_import(daemon, process, token) {
        Ok(reply) => reply,
        Err(error) => {
            warn!(pid = process.pid, "memory was not shared: {error}");
            Reply::Failed(error.into())
        }
    }
}

fn try_import(daemon: &Daemon, process: Process, token: &Token) -> Result<Reply, ImportError> {
    loop {
        let clients = daemon.clients.registry.clients();
        let importer = clients.iter().find(|it| it.process == process).ok_or(ImportError::NoClient)?;
        if let Some(suspended) = importer.worker.was_suspended().filter(|it| it.deep) {
            // It needs a worker for that.
            if !suspended.hold {
                daemon.moves.want(process);
            }
            if daemon.is_stopping() || !process.is_alive() {
                return Err(ImportError::Stopping);
            }
            std::thread::sleep(POLL_INTERVAL);
            continue;
        }
        match once(daemon, importer, &clients, token)? {
            Some(reply) => return Ok(reply),
            None if daemon.is_stopping() => return Err(ImportError::Stopping),
            None if daemon.clients.registry.wait(POLL_INTERVAL) => {}
            None => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

/// Tries once; none while a dump is in the way, or memory is being loaded.
fn once(
    daemon: &Daemon,
    importer: &Client,
    clients: &[Arc<Client>],
    token: &Token,
) -> Result<Option<Reply>, ImportError> {
    let ticket = sys::random().map_err(ImportError::Ticket)?;
    let _under_way = daemon.imports.begin(ticket, importer.allowed.clone(), importer.process.pid);
    let is_held = |client: &Client| daemon.clients.registry.is_held(&process::ancestry(client.process.pid));
    let must_wait = |client: &Client| is_held(client) || client.state() == ClientState::Loading;
    if must_wait(importer) {
        return Ok(None);
    }
    let mut some_held = false;
    // One that a restore has not let run has exported nothing yet.
    let may_export = |it: &&Arc<Client>| may_share(importer, it) && it.state() != ClientState::Restoring;
    for exporter in clients.iter().filter(may_export) {
        if must_wait(exporter) {
            some_held = true;
            continue;
        }
        let (shared, fds) = match exporter.worker.export(token) {
            Ok(exported) => exported,
            Err(WorkerError::Failed(_)) => continue,
            Err(error) => {
                debug!(%exporter, %error, "cannot ask for memory");
                continue;
            }
        };
        importer.worker.import(ticket, &shared, &fds)?;
        debug!(%exporter, %importer, pieces = fds.len(), "memory is shared");
        let own = exporter.process == importer.process;
        return Ok(Some(Reply::Imported { ticket, count: fds.len(), own }));
    }
    Ok((!some_held).then_some(Reply::NotShared))
}

/// Whether both are in one container, or both on the host.
fn are_together(one: &Allowed, other: &Allowed) -> bool {
    (one.container.is_none() && other.container.is_none()) || one.is_with(other)
}

/// Whether one process may have memory of the other: both must be of one user, and in one container or both on the host. The
/// driver's own rule is the same.
fn may_share(importer: &Client, exporter: &Client) -> bool {
    let together = are_together(&importer.allowed, &exporter.allowed);
    let user = |client: &Client| process::effective_user(client.process.pid);
    together
        && importer.process.is_alive()
        && exporter.process.is_alive()
        && user(importer).is_some_and(|it| Some(it) == user(exporter))
}

/// The memory that the clients of a tree share.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    /// For each client, in their order, the memory that other clients of the tree save.
    pub(crate) elsewhere: Vec<Vec<PieceId>>,
}

/// A process outside shares memory with the tree, so the tree cannot be dumped by itself.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "{inside} shares GPU memory with process {outside} ({command}), which is not in the tree: dump both in one tree, or end the other"
)]
pub(crate) struct SharedOutside {
    /// The pid of the client in the tree.
    pub(crate) pid: i32,
    inside: String,
    outside: i32,
    command: String,
}

/// Why the sharing is not known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SharingError {
    #[error(transparent)]
    Outside(#[from] SharedOutside),
    #[error("cannot find out what {0} shares: {1}")]
    Unknown(String, WorkerError),
    #[error(transparent)]
    Unfinished(#[from] Unfinished),
}

impl Failing for SharingError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Outside(_) => FailureKind::Refused,
            Self::Unknown(_, error) => error.kind(),
            Self::Unfinished(_) => FailureKind::Timeout,
        }
    }
}

/// The memory that these held clients share with each other. An error if they share memory with others.
pub(crate) fn within(daemon: &Daemon, tree: &[Arc<Client>]) -> Result<Sharing, SharingError> {
    let concerns = |allowed: &Allowed| tree.iter().any(|client| are_together(allowed, &client.allowed));
    let deadline = daemon.config.timeouts.quiesce.begins();
    daemon.imports.wait_for(concerns, deadline)?;
    let unknown = |client: &Client, error| SharingError::Unknown(client.to_string(), client.explain(error));
    let all = at_once(tree, |it| it.worker.shares(deadline).map_err(|error| unknown(it, error)));
    let all = all.into_iter().collect::<Result<Vec<_>, _>>()?;
    if let Some(found) = outside(daemon, tree, &all, deadline)?.pop() {
        return Err(found.into());
    }
    // The client that owns memory saves it; if the owner is gone or has freed the memory, the first client that has it does.
    let mut savers = BTreeMap::new();
    let of = |place: usize, ids: &[PieceId]| ids.iter().map(|id| (*id, place)).collect::<Vec<_>>();
    let own = all.iter().enumerate().flat_map(|(place, (own, _))| of(place, own));
    let others = all.iter().enumerate().flat_map(|(place, (_, others))| of(place, others));
    for (id, place) in own.chain(others) {
        savers.entry(id).or_insert(place);
    }
    let elsewhere = all.iter().enumerate().map(|(place, (_, others))| {
        let of_others: BTreeSet<PieceId> =
            others.iter().filter(|id| savers.get(*id) != Some(&place)).copied().collect();
        of_others.into_iter().collect()
    });
    Ok(Sharing { elsewhere: elsewhere.collect() })
}

/// A line for each client of a tree that shares with a process outside.
pub(crate) fn shared_outside(daemon: &Daemon, tree: &[Arc<Client>]) -> Vec<SharedOutside> {
    let deadline = daemon.config.timeouts.quiesce.begins();
    let all = at_once(tree, |it| it.worker.shares(deadline).unwrap_or_default());
    outside(daemon, tree, &all, deadline).unwrap_or_default()
}

type Shares = (Vec<PieceId>, Vec<PieceId>);

fn outside(
    daemon: &Daemon,
    tree: &[Arc<Client>],
    all: &[Shares],
    deadline: Deadline,
) -> Result<Vec<SharedOutside>, SharingError> {
    let mut found = Vec::new();
    if all.iter().all(|(own, others)| own.is_empty() && others.is_empty()) {
        return Ok(found);
    }
    // A process of another container can share nothing with the tree, and need not be asked.
    let can = |other: &Arc<Client>| tree.iter().any(|it| are_together(&it.allowed, &other.allowed));
    let in_tree = |other: &Arc<Client>| tree.iter().any(|it| Arc::ptr_eq(it, other));
    let mut asked = daemon.clients.registry.clients();
    // Clients of one restore that share memory run when all of it is loaded.
    let is_restored = |it: &Client| matches!(it.state(), ClientState::Loading | ClientState::Restoring);
    asked.retain(|it| can(it) && !in_tree(it) && !is_restored(it));
    let answers = at_once(&asked, |it| it.worker.shares(deadline));
    for (other, shares) in asked.iter().zip(answers) {
        let (own, others) = match shares {
            Ok(shares) => shares,
            // The memory is gone with its worker.
            Err(WorkerError::Dead(_)) => continue,
            Err(error) => return Err(SharingError::Unknown(other.to_string(), error)),
        };
        let its: BTreeSet<PieceId> = own.into_iter().chain(others).collect();
        for (client, (own, others)) in tree.iter().zip(all) {
            if own.iter().chain(others).any(|id| its.contains(id)) {
                found.push(SharedOutside {
                    pid: client.process.pid,
                    inside: client.to_string(),
                    outside: other.process.pid,
                    command: other.attach.command.escape_debug().to_string(),
                });
            }
        }
    }
    Ok(found)
}

//! A process gets a worker.
//!
//! ```text
//!   Attach ─► checked ─► a worker is taken ─► (its tree is being dumped: wait) ─► Adopt ─► a client
//!                │              │                                                   │
//!                └──────────────┴─────────── Refused, and why ◄─────────────────────┘
//! ```
//!
//! When the attach is over the daemon holds nothing of the connection: client and worker learn of each other's death by its
//! closing.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rekindle_wire::attach::{Answer, Attach, PROTOCOL, SETTINGS};
use rekindle_wire::control::WorkerRequest;
use rekindle_wire::{NotServed, frame};
use thiserror::Error;
use tracing::{debug, error, info, warn};

use super::clients::{Client, ClientState, PendingGuard};
use super::grants::{GrantError, ShareError};
use super::memfd::{self, MemfdError};
use super::oversubscribe::Wish;
use super::pool::PoolError;
use super::process::{self, Process};
use super::worker::{Need, WorkerError};
use super::{Daemon, managed, protocol, sys};
use crate::limit::Limit;

/// How long a worker may take to map the client's memory and answer the client.
const ADOPT_TIMEOUT: Limit = Limit::fixed(Duration::from_secs(60));
/// How often the daemon checks that a process which waits for the end of a dump still lives.
const HELD_LOOK: Duration = Duration::from_millis(500);
/// The longest value of a setting; the driver reads no longer one.
const MAX_VALUE: usize = 4096;

/// Why a process gets no worker.
#[derive(Debug, Error)]
pub(crate) enum AttachError {
    #[error(transparent)]
    NotServed(#[from] NotServed),
    #[error(transparent)]
    Memory(#[from] MemfdError),
    #[error("a process may not set {0:?}")]
    Setting(String),
    #[error("{0} processes use the GPUs already, and the daemon's configuration allows no more (pool.max)")]
    Full(usize),
    #[error(transparent)]
    Grant(#[from] GrantError),
    #[error("{used} processes of its container use GPUs already, and it was given {max} workers")]
    ContainerFull { used: usize, max: u32 },
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("the worker could not serve the process: {0}")]
    Adopt(WorkerError),
    /// The worker has told the process the reason.
    #[error("the worker refused the process: {0}")]
    Refused(String),
    #[error(transparent)]
    Share(#[from] ShareError),
    #[error("the process closed the connection")]
    Gone,
}

impl AttachError {
    /// The outcome, for metrics.
    fn outcome(&self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Pool(_) | Self::Adopt(_) | Self::Share(_) => "failed",
            Self::NotServed(_)
            | Self::Memory(_)
            | Self::Setting(_)
            | Self::Full(_)
            | Self::Grant(_)
            | Self::ContainerFull { .. }
            | Self::Refused(_) => "refused",
        }
    }
}

/// Serves an `Attach`, and answers it unless the worker does.
pub(crate) fn serve(
    daemon: &Arc<Daemon>,
    stream: UnixStream,
    pending: &PendingGuard,
    process: Process,
    attach: Attach,
    fds: Vec<OwnedFd>,
) {
    let (pid, command) = (process.pid, attach.command.clone());
    let began = Instant::now();
    match hand_over(daemon, &stream, pending, process, attach, fds) {
        Ok(client) => {
            daemon.metrics.attached(began.elapsed());
            info!(pid, command, worker = client.worker.pid(), "attached");
            if let Some(Err(error)) = protocol::of_environment(&client) {
                warn!(pid, command, "{PROTOCOL}: {error}; using the container's protocol or the configuration's");
            }
        }
        Err(error @ AttachError::Gone) => {
            daemon.metrics.not_attached(error.outcome());
            debug!(pid, command, "gone before it was attached");
        }
        Err(error) => {
            daemon.metrics.not_attached(error.outcome());
            warn!(pid, command, "not attached: {error}");
            if !matches!(error, AttachError::Refused(_)) {
                refuse(&stream, error.to_string());
            }
        }
    }
}

/// Refuses the process. The process writes the reason to stderr.
pub(crate) fn refuse(stream: &UnixStream, reason: String) {
    if let Err(error) = frame::send(stream, &Answer::Refused { reason }, &[], &[]) {
        debug!(%error, "cannot refuse");
    }
}

fn hand_over(
    daemon: &Arc<Daemon>,
    stream: &UnixStream,
    pending: &PendingGuard,
    process: Process,
    attach: Attach,
    fds: Vec<OwnedFd>,
) -> Result<Arc<Client>, AttachError> {
    attach.dialect.is_served()?;
    let [ring, staging] = memfd::check_pair(fds)?;
    check_settings(&attach)?;
    pending.asks(&attach);
    if let Some(max) = daemon.config.clients.max
        && !pending.reserve(max)
    {
        return Err(AttachError::Full(max));
    }
    let allowed = daemon.grants.of(process)?;
    pending.reserve_in(&allowed).map_err(|(used, max)| AttachError::ContainerFull { used, max })?;
    let worker = daemon.pool.take(&attach.settings, allowed.gpus())?;
    // From here on the worker is this client's: even after a failure, no other client gets it.
    let client = Client::new(process, attach.clone(), allowed, Arc::clone(&worker), ClientState::Running);
    while !pending.admit(&client, &process::ancestry(process.pid)) {
        daemon.clients.registry.wait(HELD_LOOK);
        if sys::is_hung_up(stream) {
            worker.kill();
            return Err(AttachError::Gone);
        }
    }
    forget_when_dead(daemon, &client);
    if let Err(error) = daemon.share(&client) {
        worker.kill();
        return Err(error.into());
    }
    daemon.clients.records.keep(worker.process(), process, stream.as_fd());
    let fds = [stream.as_raw_fd(), ring.as_raw_fd(), staging.as_raw_fd()];
    match worker.ask(&WorkerRequest::Adopt { attach, limits: daemon.config.clients.limits }, &fds, ADOPT_TIMEOUT) {
        Ok(()) => Ok(client),
        Err(error) => {
            worker.kill();
            Err(match error {
                WorkerError::Failed(failure) => AttachError::Refused(failure.reason),
                WorkerError::Dead(_) if sys::is_hung_up(stream) => AttachError::Gone,
                error => AttachError::Adopt(error),
            })
        }
    }
}

/// Has the daemon hear what the client's worker needs for it, and why the client cannot go on. It must before the worker executes
/// commands: a need that nobody hears is memory that is not there.
pub(crate) fn serve_needs(daemon: &Arc<Daemon>, client: &Client) {
    let worker = &client.worker;
    let (needed, needy, client_process) = (Arc::downgrade(daemon), Arc::downgrade(worker), client.process);
    worker.on_need(move |need| {
        let (Some(daemon), Some(worker)) = (needed.upgrade(), needy.upgrade()) else { return };
        let makes_room = daemon.config.gpu.oversubscribe && worker.makes_room();
        match need {
            _ if worker.keeps() => daemon.moves.want(client_process),
            // It tries again, and asks again if that is not enough.
            Need::Room if worker.makes_room() && daemon.preloads.give_way() => {
                worker.say(&WorkerRequest::Room { coming: false, how_much: false, again: true });
            }
            Need::Room => daemon.copying.memory_pressure.needed_by(&worker, makes_room),
            Need::Free { free, since } if makes_room => {
                daemon.oversubscription.wish(&worker, Wish { free, since });
            }
            // Nobody has asked.
            Need::Free { .. } => {}
        }
    });
    let (faulty, command) = (client.process, client.attach.command.clone());
    let metrics = Arc::clone(&daemon.metrics);
    worker.on_fault(move |why| {
        metrics.shared_memory_fault();
        error!(pid = faulty.pid, command, "killing the process: {why}");
        faulty.kill();
    });
}

/// Serves the client's needs, and removes the client when its worker dies. The client's share of the container's limits is released at
/// the same time, also where the client has another worker by then.
pub(crate) fn forget_when_dead(daemon: &Arc<Daemon>, client: &Arc<Client>) {
    serve_needs(daemon, client);
    let (worker, allowed) = (&client.worker, client.allowed.clone());
    let (registry, lost, pid) =
        (Arc::downgrade(&daemon.clients.registry), Arc::downgrade(&daemon.clients.lost), worker.pid());
    let (grants, stage) = (Arc::downgrade(&daemon.grants), Arc::downgrade(&daemon.copying.stage));
    let (records, process) = (Arc::downgrade(&daemon.clients.records), worker.process());
    let process_of_client = client.process;
    let (charges, oversubscription) = (Arc::clone(&daemon.charges), Arc::clone(&daemon.oversubscription));
    let metrics = Arc::clone(&daemon.metrics);
    let gpus: Vec<_> = worker.attached().devices.iter().map(|it| it.uuid).collect();
    worker.on_death(move || {
        oversubscription.ends(process, gpus.clone());
        let starved = charges.starved(process);
        let known = registry.upgrade().and_then(|it| it.of_worker(pid));
        // Before the client is removed, so that whoever lists clients finds it in one of both.
        let loss = known.as_ref().map(|client| {
            // The worker's own log lines say more, and come first, when the worker has failed.
            let death = client.worker.death().to_string();
            let reason = starved.map_or(death.clone(), |why| format!("{death}: {why}"));
            (lost.upgrade().is_some_and(|it| it.note(client, reason.clone())), reason)
        });
        let client = registry.upgrade().and_then(|it| it.remove(pid));
        if client.is_none() && loss.is_some() {
            // Another worker has taken it over meanwhile.
            lost.upgrade().inspect(|it| it.found(process_of_client));
        }
        if let Some(stage) = stage.upgrade() {
            stage.take_back(pid);
        }
        if let Some(grants) = grants.upgrade() {
            grants.release(&allowed, pid);
        }
        charges.left(process);
        if let Some(records) = records.upgrade() {
            records.forget(process);
        }
        if let (Some(client), Some((is_loss, reason))) = (client, loss) {
            if is_loss {
                metrics.worker_lost();
                managed::lose(client.process);
            }
            let said = match is_loss {
                true => format!("it has lost its worker: {reason}"),
                false => "gone, and its worker with it".to_owned(),
            };
            info!(pid = client.process.pid, command = client.attach.command, worker = pid, "{said}");
        }
    });
}

/// Checks the settings. Settings that the driver reads go into the worker's environment.
fn check_settings(attach: &Attach) -> Result<(), AttachError> {
    for (name, value) in &attach.settings {
        let known = SETTINGS.contains(&name.as_str()) || name == PROTOCOL;
        if !known || value.len() > MAX_VALUE || value.contains('\0') {
            return Err(AttachError::Setting(name.chars().take(64).collect()));
        }
    }
    Ok(())
}

//! A dump that begins when its application says so.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use rekindle_wire::control::{Failing, FailureKind, WorkerRequest};
use thiserror::Error;
use tracing::debug;

use super::checkpoints::{DumpGuard, Moment, POLL_INTERVAL};
use super::clients::Client;
use super::worker::WorkerError;
use super::{Daemon, at_once, process, sys};
use crate::limit::Limit;

/// Why a dump does not begin at its application's moment.
#[derive(Debug, Error)]
pub(crate) enum MomentError {
    #[error("no process of the tree has called rekindle_checkpoint within {0} s")]
    Never(u64),
    #[error("the command that waited for the application's moment has ended")]
    Gone,
    #[error("cannot tell {client} that a dump waits for its moment: {source}")]
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

/// Waits until the application says that the moment has come, if the order of this dump asks for that. A dump that copies
/// memory beforehand waits twice: its image is of the moment after that copy. CRIU waits for the answer to its first question,
/// and the processes run.
pub(crate) fn wait_for_moment(daemon: &Daemon, stream: &UnixStream, dump: &DumpGuard<'_>) -> Result<(), MomentError> {
    let Some(Moment { timeout, .. }) = daemon.checkpoints.moment(dump) else { return Ok(()) };
    daemon.checkpoints.wait_again(dump);
    let mut told = Told { clients: Vec::new(), limit: daemon.config.timeouts.quiesce };
    let began = Instant::now();
    let waited = loop {
        let tree = process::tree(dump.root).unwrap_or_default();
        let clients = daemon.clients.registry.clients_among(&tree);
        // The dump waits before a client can know: a client announces its moment once, as soon as its worker is told.
        dump.progress.waits(true, &pids_of(&clients));
        if let Err(error) = told.tell(clients) {
            break Err(error);
        }
        match daemon.checkpoints.moment(dump) {
            None => break Err(MomentError::Gone),
            Some(moment) if moment.has_come => break Ok(()),
            Some(_) if sys::is_hung_up(stream) => break Err(MomentError::Gone),
            Some(_) if began.elapsed() >= timeout => break Err(MomentError::Never(timeout.as_secs())),
            Some(_) => std::thread::sleep(POLL_INTERVAL),
        }
    };
    dump.progress.waits(false, &pids_of(&told.clients));
    waited
}

fn pids_of(clients: &[Arc<Client>]) -> Vec<i32> {
    clients.iter().map(|it| it.process.pid).collect()
}

/// Clients that know that a dump waits for their moment. When this is dropped, they are told that none does.
struct Told {
    clients: Vec<Arc<Client>>,
    /// How long a worker may take to receive that.
    limit: Limit,
}

impl Told {
    /// Tells the clients that do not know yet. A client that ends meanwhile need not know.
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
    /// A client that cannot be told asks the daemon in vain, until the next dump that waits for its moment is over.
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

//! Bringing clients to rest together, and letting them go whatever happens.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rekindle_wire::control::WorkerRequest;
use thiserror::Error;
use tracing::{debug, warn};

use super::super::clients::{Client, ClientState};
use super::super::thread;
use super::super::worker::WorkerError;

/// How much later than it should a worker may answer.
const GRACE: Duration = Duration::from_secs(2);
/// How long a dump that is over may take to let a client go.
const LET_GO: Duration = Duration::from_secs(2);
/// How long a worker may take to open its ring.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

/// Why clients are not at rest.
#[derive(Debug, Error)]
pub(in crate::daemon) enum QuiesceError {
    #[error("{0} is being dumped or restored already: wait until that is over")]
    Busy(String),
    #[error("{client} does not come to rest: {source}; it goes on")]
    Client { client: String, source: WorkerError },
}

/// A client that executes nothing. It goes on when this is dropped.
pub(super) struct ClosedRing {
    client: Arc<Client>,
    closed: bool,
}

impl ClosedRing {
    /// Whose.
    pub(super) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    /// Lets it go on, and waits until it does.
    pub(super) fn open(mut self) -> Result<(), WorkerError> {
        let worker = &self.client.worker;
        worker.ask(&WorkerRequest::Open, &[], Some(OPEN_TIMEOUT))?;
        self.closed = false;
        self.client.set_state(ClientState::Running);
        Ok(())
    }
}

impl Drop for ClosedRing {
    /// In the background, since a worker may have to end first what it was asked before.
    fn drop(&mut self) {
        if !self.closed || self.client.worker.is_dead() {
            self.client.set_state(ClientState::Running);
            return;
        }
        let client = Arc::clone(&self.client);
        let open = move || {
            match client.worker.ask(&WorkerRequest::Open, &[], None) {
                Ok(()) => debug!("{client} goes on"),
                // Its tasks were killed, as they should in a dump that does not leave them running.
                Err(WorkerError::Dead(_)) => {}
                Err(error) => warn!("{client} cannot go on: {error}"),
            }
            client.set_state(ClientState::Running);
        };
        if let Err(error) = thread("open", open) {
            warn!("{} cannot go on: {error}", self.client);
        }
    }
}

/// Quiesces clients, all at the same time. On an error all of them go on.
pub(super) fn quiesce(clients: &[Arc<Client>], timeout: Duration) -> Result<Vec<ClosedRing>, QuiesceError> {
    let results: Vec<_> = std::thread::scope(|scope| {
        let asked: Vec<_> = clients.iter().map(|client| scope.spawn(move || quiesce_one(client, timeout))).collect();
        asked.into_iter().filter_map(|it| it.join().ok()).collect()
    });
    results.into_iter().collect()
}

fn quiesce_one(client: &Arc<Client>, timeout: Duration) -> Result<ClosedRing, QuiesceError> {
    let asked = Instant::now();
    while !client.leave_running(ClientState::Quiesced) {
        // A dump that was just given up lets its clients go in the background.
        if asked.elapsed() >= LET_GO {
            return Err(QuiesceError::Busy(client.to_string()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut ring = ClosedRing { client: Arc::clone(client), closed: true };
    let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
    let request = WorkerRequest::Quiesce { timeout_ms };
    let limit = timeout.saturating_add(GRACE);
    match client.worker.ask(&request, &[], Some(limit)) {
        Ok(()) => Ok(ring),
        Err(source) => {
            // One that has said so is open; one that said nothing may close yet.
            ring.closed = !matches!(source, WorkerError::Failed(_));
            Err(QuiesceError::Client { client: client.to_string(), source })
        }
    }
}

//! A rehearsal: a spare worker proves that another worker can place a client's code at its addresses, before an image is committed
//! or the client is suspended deeply.
//!
//! Clients whose log lacks unloaded code always need a rehearsal (`ctx-worker/src/checkpoint/cut.rs`), and so do those with code outside
//! of the driver's reserve (`ctx-worker/src/resources/code_reserve.rs`) or with a heap of the driver's
//! (`ctx-worker/src/resources/kernel_heap.rs`). The others are restored by repeating their log; the operator may want a proof of that too
//! (`checkpoint.rehearse`), since the driver decides where code goes. The spare worker ends with the rehearsal.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rekindle_ctx_worker::state;
use rekindle_images::{Client as Record, HashKey};
use rekindle_wire::control::{Failing, FailureKind, Limits, WorkerRequest};
use thiserror::Error;
use tracing::info;

use super::clients::Client;
use super::grants::Uuid;
use super::pool::{Pool, PoolError};
use super::worker::{Timeout, Worker, WorkerError};
use crate::limit::Limit;

/// The worker of a rehearsal. No client ever gets it.
struct Spare(Arc<Worker>);

impl Drop for Spare {
    fn drop(&mut self) {
        self.0.kill();
    }
}

/// Whether a client's part of the manifest must be rehearsed.
pub(crate) fn is_needed(record: &Record) -> bool {
    state::needs_rehearsal(&record.worker_state)
}

/// Why nothing is proved.
#[derive(Debug, Error)]
pub(crate) enum RehearsalError {
    #[error("no worker rehearses whether another can load its code: {0}")]
    NoWorker(PoolError),
    #[error("another worker cannot place its code where it is: {0}")]
    Failed(WorkerError),
}

impl Failing for RehearsalError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::NoWorker(error) => error.kind(),
            Self::Failed(error) => error.kind(),
        }
    }
}

/// Proves that code in these files can be placed again for the client whose part of a manifest the blob is. The worker may not be
/// idle for longer than the limit.
pub(crate) fn rehearse(
    pool: &Pool,
    client: &Client,
    key: HashKey,
    (blob, code): (&[u8], &[(String, OwnedFd)]),
    limit: Limit,
) -> Result<(), RehearsalError> {
    let began = std::time::Instant::now();
    let spare = take(pool, client).map_err(RehearsalError::NoWorker)?;
    load(&spare.0, key, blob, code, limit).map_err(RehearsalError::Failed)?;
    info!(%client, ms = began.elapsed().as_millis() as u64, "a rehearsal has shown that its code can be placed again");
    Ok(())
}

/// Takes a worker that sees the same GPUs as the client's worker.
fn take(pool: &Pool, client: &Client) -> Result<Spare, PoolError> {
    let gpus = |devices: &[rekindle_wire::attach::Device]| devices.iter().map(|it| it.uuid).collect::<Vec<Uuid>>();
    let (seen, usual) = (gpus(&client.worker.attached().devices), gpus(&pool.devices()?));
    let other = (seen != usual).then_some(seen);
    pool.take(&client.attach.settings, other.as_deref()).map(Spare)
}

fn load(
    worker: &Worker,
    key: HashKey,
    blob: &[u8],
    code: &[(String, OwnedFd)],
    limit: Limit,
) -> Result<(), WorkerError> {
    let timeout = Timeout::WhileItWorks(limit);
    worker.send_code(code, timeout)?;
    let (hash_algorithm, hash_key) = key.to_parts();
    let limits = Limits::default();
    let (data, code) = (Vec::new(), Vec::new());
    let (rehearsal, early, warm, steps) = (true, false, false, false);
    let request = WorkerRequest::Load { data, hash_algorithm, hash_key, code, limits, rehearsal, early, warm, steps };
    worker.ask_with(&request, blob, &[], timeout)
}

//! Workers that have the code of clients that are about to come.
//!
//! ```text
//!   Preloaded ─► a worker of the pool: LoadCode ─┬─► the restore takes it, and its log is replayed without loading libraries
//!                                                └─► it ends: the connection has closed, or a program has found no memory
//! ```
//!
//! Most of a replay goes into loading libraries, and the processes of a migration stand still meanwhile.

use std::sync::Arc;

use rekindle_images::{Client as Record, Image};
use rekindle_wire::control::WorkerRequest;
use tracing::info;

use super::super::Daemon;
use super::super::worker::{Timeout, Worker};
use super::advance::Workers;
use super::check;
use super::error::RestoreError;
use super::load;
use super::preloads::{Ready, pids};
use super::room::shortage;

/// What is to be free on each GPU besides what the clients need there: for the contexts of the workers that the pool starts in the place of
/// these.
const FOR_CONTEXTS: u64 = 1 << 30;

/// Has a worker for each client of an image load the client's code. `keep` gets each before it does.
pub(super) fn load(daemon: &Daemon, image: &Image, keep: impl Fn(Ready)) -> Result<(), RestoreError> {
    let manifest = image.manifest();
    let Workers { all, gpus } = Workers::take(daemon, manifest)?;
    let ready = check::attached(manifest).zip(gpus).zip(&all);
    let ready: Vec<_> = ready
        .map(|((record, gpus), worker)| Ready::new(pids(record), load::settings(record), gpus, Arc::clone(worker)))
        .collect();
    if let Some((needed, free)) = shortage(manifest, &all, &[], |needed, _| needed.saturating_add(FOR_CONTEXTS)) {
        return Err(RestoreError::NoRoomInAdvance { needed, free });
    }
    for ((record, worker), ready) in check::attached(manifest).zip(&all).zip(ready) {
        if !worker.loads_code() {
            continue;
        }
        keep(ready);
        load_code(daemon, worker, image, record)?;
        info!(worker = worker.pid(), "the code of {} is loaded in advance", check::name(record));
    }
    Ok(())
}

fn load_code(daemon: &Daemon, worker: &Worker, image: &Image, record: &Record) -> Result<(), RestoreError> {
    let timeout = Timeout::WhileItWorks(daemon.config.timeouts.stall);
    let failed = |error| RestoreError::Worker(check::name(record), error);
    worker.send_code(&load::code_files(record, image)?, timeout).map_err(failed)?;
    worker.ask_with(&WorkerRequest::LoadCode, &record.to_bytes()?, &[], timeout).map_err(failed)
}

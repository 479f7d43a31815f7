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
use rekindle_wire::frame::MAX_FDS;
use tracing::{debug, info};

use super::super::grants::Uuid;
use super::super::spawn::Settings;
use super::super::worker::{Timeout, Worker};
use super::super::{Daemon, sys};
use super::check;
use super::error::RestoreError;
use super::load::{self, Files};
use super::preloads::pids;

/// This part of a GPU's memory is to be free besides what the client needs: for the context of the worker that the pool starts in the place
/// of this one, and what the driver takes besides.
const LEFT_FREE: u64 = 32;

/// A worker that is ready for a client. It ends when this is dropped, unless a restore has taken it.
pub(super) struct Ready {
    pids: (u32, u32),
    settings: Settings,
    gpus: Option<Vec<Uuid>>,
    worker: Option<Arc<Worker>>,
}

impl Drop for Ready {
    fn drop(&mut self) {
        if let Some(worker) = self.worker.take() {
            worker.kill();
        }
    }
}

impl Ready {
    /// The worker, if it is one for this client with these settings and GPUs. It may still be loading code: its requests wait for that.
    pub(super) fn take(&mut self, record: &Record, settings: &Settings, gpus: Option<&[Uuid]>) -> Option<Arc<Worker>> {
        let is_it = self.pids == pids(record) && self.settings == *settings && self.gpus.as_deref() == gpus;
        self.worker.take_if(|worker| is_it && !worker.is_dead())
    }
}

/// Has a worker for each client of an image load the client's code. `keep` gets each before it does.
pub(super) fn load(daemon: &Daemon, image: &Image, keep: impl Fn(Ready)) -> Result<(), RestoreError> {
    let manifest = image.manifest();
    let gpus = load::choose_gpus(daemon, manifest, None)?;
    for (record, gpus) in check::attached(manifest).zip(gpus) {
        let settings = load::settings(record);
        let worker = daemon.pool.take_in_advance(&settings, gpus.as_deref())?;
        let ready = Ready { pids: pids(record), settings, gpus, worker: Some(Arc::clone(&worker)) };
        if !worker.loads_code() || !has_room(&worker, record) {
            debug!(worker = worker.pid(), "no code is loaded in advance");
            continue;
        }
        keep(ready);
        load_code(daemon, &worker, image, record)?;
        info!(worker = worker.pid(), "the code of {} is loaded in advance", check::name(record));
    }
    Ok(())
}

fn load_code(daemon: &Daemon, worker: &Worker, image: &Image, record: &Record) -> Result<(), RestoreError> {
    let timeout = Timeout::WhileItWorks(daemon.config.timeouts.stall);
    let failed = |error| RestoreError::Worker(check::name(record), error);
    let files = check::code_of(record).into_iter().map(|hash| Ok((hash.to_string(), image.code(hash)?)));
    let files: Vec<_> = files.collect::<Result<_, RestoreError>>()?;
    for files in files.chunks(MAX_FDS) {
        let request = WorkerRequest::Code { code: files.iter().map(|it| it.0.clone()).collect() };
        worker.ask(&request, &sys::raw(files.iter().map(|it| &it.1)), timeout).map_err(failed)?;
    }
    worker.ask_with(&WorkerRequest::LoadCode, &record.to_bytes()?, &[], timeout).map_err(failed)
}

/// Whether the client's memory has room beside what is on the GPUs now.
fn has_room(worker: &Worker, record: &Record) -> bool {
    let memory = worker.memory().unwrap_or_default();
    (0..).zip(&memory).all(|(ordinal, found)| {
        let here = record.allocations.iter().filter(|it| it.device == ordinal);
        match here.fold(0, |sum: u64, it| sum.saturating_add(it.size)) {
            0 => true,
            needed => found.free >= needed.saturating_add(found.total / LEFT_FREE),
        }
    })
}

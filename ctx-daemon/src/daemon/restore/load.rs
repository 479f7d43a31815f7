//! Workers for a restore, and their loading in the background.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rekindle_images::{Client as Record, CodeHash, HashKey, Image, ImageError};
use rekindle_wire::control::{DataFile, Limits, WorkerRequest};
use rekindle_wire::frame::MAX_FDS;
use rekindle_wire::ipc::{PIECES_AT_A_TIME, PieceId};
use tracing::{debug, info};

use super::super::grants::Allowed;
use super::super::pool::PoolError;
use super::super::worker::{Worker, WorkerError};
use super::super::{Daemon, sys, thread};
use super::state::Restore;
use super::{RestoreError, check, place};

/// A worker for each client that needs one, in their order.
pub(super) fn take_workers(
    daemon: &Daemon,
    image: &Image,
    restorer: &Allowed,
) -> Result<Vec<Arc<Worker>>, RestoreError> {
    let devices = daemon.pool.devices()?;
    let choose = |record| place::choose(record, &image.manifest().host, &devices, restorer.gpus());
    let taken: Vec<Result<_, PoolError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = check::attached(image)
            .map(|record| {
                let settings = record.settings.iter();
                let settings = settings.map(|it| (it.name.clone(), it.value.clone()));
                let settings = settings.collect();
                let gpus = choose(record);
                scope.spawn(move || daemon.pool.take(&settings, gpus.as_deref()))
            })
            .collect();
        let gone = |_| Err(PoolError::Failed("a thread of the daemon's is gone".into()));
        let joined = threads.into_iter().map(|it| it.join().unwrap_or_else(gone));
        joined.collect()
    });
    if let Some(error) = taken.iter().find_map(|it| it.as_ref().err()) {
        let error = error.clone();
        for worker in taken.into_iter().flatten() {
            worker.kill();
        }
        return Err(error.into());
    }
    Ok(taken.into_iter().flatten().collect())
}

/// What clients of the image have in common is made by one of them, and given to the others.
pub(super) fn share(image: &Image, restore: &Restore) -> Result<(), RestoreError> {
    let mut made: HashMap<PieceId, OwnedFd> = HashMap::new();
    let mut needed = Vec::new();
    for (record, worker) in check::attached(image).zip(restore.workers()) {
        let failed = |error| RestoreError::Worker(check::name(record), error);
        let blob = record.to_bytes()?;
        let (all, others) = worker.make_shared(&blob).map_err(failed)?;
        made.extend(all);
        needed.push((record, worker, others));
    }
    for (record, worker, ids) in needed {
        let failed = |error| RestoreError::Worker(check::name(record), error);
        for ids in ids.chunks(PIECES_AT_A_TIME) {
            let fds = ids.iter().map(|id| made.get(id)).collect::<Option<Vec<_>>>();
            let fds = fds.ok_or_else(|| RestoreError::NotShared(check::name(record)))?;
            worker.ask(&WorkerRequest::TakeShared { ids: ids.to_vec() }, &sys::raw(fds), None).map_err(failed)?;
        }
    }
    Ok(())
}

/// Has every worker begin. Files are opened here, so that what is missing fails the restore now.
pub(super) fn start(image: &Image, restore: &Arc<Restore>, limits: Limits) -> Result<(), RestoreError> {
    for (place, (record, worker)) in check::attached(image).zip(restore.workers()).enumerate() {
        let job = Load {
            hash: image.manifest().hash_key,
            blob: record.to_bytes()?,
            data: data_files(image, record)?,
            code: code_files(image, record)?,
            limits,
        };
        let (name, worker) = (check::name(record), Arc::clone(worker));
        let restore = Arc::clone(restore);
        thread("load", move || {
            let began = std::time::Instant::now();
            let result = job.run(&worker);
            match &result {
                Ok(()) => {
                    let ms = began.elapsed().as_millis() as u64;
                    info!(worker = worker.pid(), ms, "phase load: {name}");
                }
                // Told when the process is resumed.
                Err(error) => debug!(worker = worker.pid(), "{name}: {error}"),
            }
            restore.loaded(place, result);
        })?;
    }
    Ok(())
}

/// There are not too many for a message: `check` has seen to that.
fn data_files(image: &Image, record: &Record) -> Result<Vec<(DataFile, OwnedFd)>, ImageError> {
    let files = image.data_files_of(record).into_iter();
    files.map(|it| Ok((DataFile { depth: it.depth, index: it.index }, image.data_file(it)?.into()))).collect()
}

fn code_files(image: &Image, record: &Record) -> Result<Vec<CodeFile>, ImageError> {
    let hashes: BTreeSet<CodeHash> = record.objects.iter().flat_map(|it| it.code.iter().copied()).collect();
    let open = |hash: CodeHash| Ok((hash.to_string(), image.code_file(hash)?.into()));
    hashes.into_iter().map(open).collect()
}

/// What one worker loads.
struct Load {
    hash: HashKey,
    blob: Vec<u8>,
    /// Of the image, and of those that it builds on.
    data: Vec<(DataFile, OwnedFd)>,
    code: Vec<CodeFile>,
    limits: Limits,
}

/// Its hash, and the file.
type CodeFile = (String, OwnedFd);

impl Load {
    fn run(self, worker: &Worker) -> Result<(), WorkerError> {
        // The data files take places in the last message.
        let (last, before) = self.split();
        for code in before {
            let request = WorkerRequest::Code { code: code.iter().map(|it| it.0.clone()).collect() };
            worker.ask(&request, &sys::raw(code.iter().map(|it| &it.1)), None)?;
        }
        let code = last.iter().map(|it| it.0.clone()).collect();
        let (hash_algorithm, hash_key) = self.hash.to_parts();
        let data = self.data.iter().map(|it| it.0).collect();
        let request = WorkerRequest::Load { data, hash_algorithm, hash_key, code, limits: self.limits };
        let fds = self.data.iter().map(|it| &it.1).chain(last.iter().map(|it| &it.1));
        worker.ask_with(&request, &self.blob, &sys::raw(fds), None)
    }

    fn split(&self) -> (&[CodeFile], std::slice::Chunks<'_, CodeFile>) {
        let in_last = self.code.len().min(MAX_FDS - self.data.len());
        let (before, last) = self.code.split_at(self.code.len() - in_last);
        (last, before.chunks(MAX_FDS))
    }
}

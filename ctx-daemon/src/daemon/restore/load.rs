//! Workers for a restore, and their loading in the background.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use rekindle_images::{Client as Record, CodeHash, HashKey, Image, ImageError};
use rekindle_wire::control::{DataFile, Limits, WorkerRequest};
use rekindle_wire::frame::MAX_FDS;
use rekindle_wire::ipc::{PIECES_AT_A_TIME, PieceId};
use tracing::{debug, info};

use super::super::content::wait_for_content;
use super::super::grants::Allowed;
use super::super::pool::{HoldOff, PoolError};
use super::super::worker::{Timeout, Worker, WorkerError};
use super::super::{Daemon, sys, thread};
use super::error::RestoreError;
use super::state::Restore;
use super::{check, place};
use crate::limit::Limit;

/// Takes a worker for each client that needs one, in their order.
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
        let gone = |_| Err(PoolError::Thread);
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

/// Has one of the clients make the memory that several of them share, and give it to the others. No worker may be idle for
/// longer than the limit. Returns whether there is such memory.
pub(super) fn share(image: &Image, restore: &Restore, limit: Limit) -> Result<bool, RestoreError> {
    let timeout = Timeout::WhileItWorks(limit);
    let mut made: HashMap<PieceId, OwnedFd> = HashMap::new();
    let mut needed = Vec::new();
    for (record, worker) in check::attached(image).zip(restore.workers()) {
        let failed = |error| RestoreError::Worker(check::name(record), error);
        let blob = record.to_bytes()?;
        let (all, others) = worker.make_shared(&blob, timeout).map_err(failed)?;
        made.extend(all);
        needed.push((record, worker, others));
    }
    let shared = !made.is_empty() || needed.iter().any(|(_, _, ids)| !ids.is_empty());
    for (record, worker, ids) in needed {
        let failed = |error| RestoreError::Worker(check::name(record), error);
        for ids in ids.chunks(PIECES_AT_A_TIME) {
            let fds = ids.iter().map(|id| made.get(id)).collect::<Option<Vec<_>>>();
            let fds = fds.ok_or_else(|| RestoreError::NotShared(check::name(record)))?;
            worker.ask(&WorkerRequest::TakeShared { ids: ids.to_vec() }, &sys::raw(fds), timeout).map_err(failed)?;
        }
    }
    Ok(shared)
}

/// How workers load.
#[derive(Clone, Copy)]
pub(super) struct How {
    pub(super) limits: Limits,
    /// Workers that can do that load the content of device memory last, and processes need not wait for it.
    pub(super) early: bool,
    /// How long a worker may be idle.
    pub(super) limit: Limit,
}

/// Has every worker begin to load. The files are opened here, so that a missing file fails the restore now. The pool starts
/// spare workers again when the processes need not wait any longer.
pub(super) fn start(
    image: &Image,
    restore: &Arc<Restore>,
    how: How,
    hold_off: &Arc<HoldOff>,
) -> Result<(), RestoreError> {
    for (place, (record, worker)) in check::attached(image).zip(restore.workers()).enumerate() {
        let job = Load {
            hash: image.manifest().hash_key,
            blob: record.to_bytes()?,
            data: data_files(image, record)?,
            code: code_files(image, record)?,
            limits: how.limits,
            early: how.early && worker.loads_beside(),
            limit: how.limit,
        };
        let (name, worker) = (check::name(record), Arc::clone(worker));
        let (restore, hold_off) = (Arc::clone(restore), Arc::clone(hold_off));
        thread("load", move || {
            let began = Instant::now();
            let Load { early, limit, .. } = job;
            let mut result = job.run(&worker);
            drop(hold_off);
            if early && result.is_ok() {
                restore.prepared(place);
                result = wait_for_content(&worker, &name, limit);
            }
            match &result {
                Ok(()) => {
                    let ms = began.elapsed().as_millis() as u64;
                    info!(worker = worker.pid(), ms, "phase load: {name}");
                }
                // The next `Resume` reports the error.
                Err(error) => debug!(worker = worker.pid(), "{name}: {error}"),
            }
            restore.loaded(place, result);
        })?;
    }
    Ok(())
}

fn data_files(image: &Image, record: &Record) -> Result<Vec<(DataFile, OwnedFd)>, ImageError> {
    let files = record.data_files().into_iter();
    files.map(|it| Ok((DataFile { depth: it.depth, index: it.index }, image.data_file(it)?.into()))).collect()
}

fn code_files(image: &Image, record: &Record) -> Result<Vec<CodeFile>, ImageError> {
    let hashes: BTreeSet<CodeHash> = record.objects.iter().flat_map(|it| it.code.iter().copied()).collect();
    let open = |hash: CodeHash| Ok((hash.to_string(), image.code_file(hash)?.into()));
    hashes.into_iter().map(open).collect()
}

/// The part of an image that one worker loads.
pub(in crate::daemon) struct Load {
    pub(in crate::daemon) hash: HashKey,
    pub(in crate::daemon) blob: Vec<u8>,
    /// The data files of the image, and of the images that it builds on.
    pub(in crate::daemon) data: Vec<(DataFile, OwnedFd)>,
    pub(in crate::daemon) code: Vec<CodeFile>,
    pub(in crate::daemon) limits: Limits,
    /// As in `WorkerRequest::Load`.
    pub(in crate::daemon) early: bool,
    /// How long the worker may be idle.
    pub(in crate::daemon) limit: Limit,
}

/// A hash of code, and the file with the code.
pub(in crate::daemon) type CodeFile = (String, OwnedFd);

impl Load {
    pub(in crate::daemon) fn run(self, worker: &Worker) -> Result<(), WorkerError> {
        let timeout = Timeout::WhileItWorks(self.limit);
        // The last message has room for the rest of both lists.
        let (data_before, data) = split(&self.data, 0);
        for files in data_before {
            let request = WorkerRequest::Data { data: files.iter().map(|it| it.0).collect() };
            worker.ask(&request, &sys::raw(files.iter().map(|it| &it.1)), timeout)?;
        }
        let (code_before, code) = split(&self.code, data.len());
        for files in code_before {
            let request = WorkerRequest::Code { code: files.iter().map(|it| it.0.clone()).collect() };
            worker.ask(&request, &sys::raw(files.iter().map(|it| &it.1)), timeout)?;
        }
        let (hash_algorithm, hash_key) = self.hash.to_parts();
        let fds = data.iter().map(|it| &it.1).chain(code.iter().map(|it| &it.1));
        let request = WorkerRequest::Load {
            data: data.iter().map(|it| it.0).collect(),
            hash_algorithm,
            hash_key,
            code: code.iter().map(|it| it.0.clone()).collect(),
            limits: self.limits,
            rehearsal: false,
            early: self.early,
        };
        worker.ask_with(&request, &self.blob, &sys::raw(fds), timeout)
    }
}

/// Splits a list into parts that go ahead in messages of their own, and a rest that fits into a message with `taken` places.
fn split<T>(all: &[T], taken: usize) -> (std::slice::Chunks<'_, T>, &[T]) {
    let in_last = all.len().min(MAX_FDS.saturating_sub(taken));
    let (before, last) = all.split_at(all.len() - in_last);
    (before.chunks(MAX_FDS), last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_place_in_a_message_goes_ahead_and_all_arrives_in_order() {
        for (count, taken, messages) in [(0, 0, 0), (250, 0, 0), (251, 0, 1), (1040, 0, 4), (5, 250, 1), (300, 249, 2)]
        {
            let all: Vec<_> = (0..count).collect();
            let (before, last) = split(&all, taken);
            assert!(last.len() + taken <= MAX_FDS && before.clone().all(|it| it.len() <= MAX_FDS));
            assert_eq!(before.len(), messages, "{count} {taken}");
            assert_eq!(before.flatten().chain(last).copied().collect::<Vec<_>>(), all);
        }
    }
}

//! Workers for a restore, and their loading in the background.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rekindle_images::{Client as Record, CodeHash, DataFile as DataFileName, HashKey, Image, Manifest};
use rekindle_wire::control::{
    ASSURED, DataFile, Failure, FailureKind, Learned, Limits, MEMORY_MAPPED, WorkerReply, WorkerRequest,
};
use rekindle_wire::frame::MAX_FDS;
use rekindle_wire::ipc::{PIECES_AT_A_TIME, PieceId};
use tracing::{debug, info};

use super::super::content::wait_for_content;
use super::super::grants::Uuid;
use super::super::pool::{HoldOff, PoolError};
use super::super::spawn::Settings;
use super::super::worker::{Timeout, Worker, WorkerError};
use super::super::{Daemon, at_once, lock, sys, thread};
use super::error::RestoreError;
use super::preloads::ToCopy;
use super::promises::Promises;
use super::state::Restore;
use super::warm::{Content, Loading};
use super::{check, place};
use crate::limit::Limit;

/// The GPUs for each client that needs a worker, in their order; none for a client that sees all. They are among those that the
/// restorer may use.
pub(super) fn choose_gpus(
    daemon: &Daemon,
    manifest: &Manifest,
    may: Option<&[Uuid]>,
) -> Result<Vec<Option<Vec<Uuid>>>, PoolError> {
    let devices = daemon.pool.devices()?;
    Ok(check::attached(manifest).map(|record| place::choose(record, &manifest.host, &devices, may)).collect())
}

/// The settings that a client's worker must have.
pub(super) fn settings(record: &Record) -> Settings {
    record.settings.iter().map(|it| (it.name.clone(), it.value.clone())).collect()
}

/// Takes a worker for each client that needs one, in their order, all at once. `take` takes one for a client, which has these settings
/// and sees these GPUs.
pub(super) fn take_workers(
    manifest: &Manifest,
    gpus: &[Option<Vec<Uuid>>],
    take: impl Fn(&Record, &Settings, Option<&[Uuid]>) -> Result<Arc<Worker>, PoolError> + Sync,
) -> Result<Vec<Arc<Worker>>, RestoreError> {
    let wanted: Vec<_> = check::attached(manifest).zip(gpus).collect();
    let taken = at_once(&wanted, |(record, gpus)| take(record, &settings(record), gpus.as_deref()));
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
pub(super) fn share(manifest: &Manifest, workers: &[Arc<Worker>], limit: Limit) -> Result<bool, RestoreError> {
    let timeout = Timeout::WhileItWorks(limit);
    let mut made: HashMap<PieceId, OwnedFd> = HashMap::new();
    let mut needed = Vec::new();
    for (record, worker) in check::attached(manifest).zip(workers) {
        let failed = |error| RestoreError::Worker(check::name(record), error);
        let blob = without_content(record).to_bytes()?;
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

/// A client without what is long where it has much memory, and does not say what it shares.
fn without_content(record: &Record) -> Record {
    let Record { worker_version, worker_state, .. } = record;
    Record { worker_version: *worker_version, worker_state: worker_state.clone(), ..Record::default() }
}

/// How workers load.
#[derive(Clone, Copy)]
pub(in crate::daemon) struct How {
    pub(in crate::daemon) limits: Limits,
    pub(in crate::daemon) mode: Mode,
    /// How long a worker may be idle.
    pub(in crate::daemon) limit: Limit,
}

/// When the content of device memory is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon) enum Mode {
    /// Before the worker answers.
    Whole,
    /// Last, after the answer: a process need not wait for it.
    Early,
    /// The same, and the process need not even wait for the answer, if the worker says so.
    Ahead,
    /// When a restore begins: until then there is no device memory.
    Warm,
}

impl Mode {
    /// Whether the worker's answer may come before the content.
    fn is_early(self) -> bool {
        matches!(self, Self::Early | Self::Ahead)
    }
}

/// What a worker of a restore has to do.
pub(super) enum Work {
    Load(Load),
    /// The client is loaded, but for its device memory.
    BringBack {
        /// Whether the process need not wait for the content.
        early: bool,
        limit: Limit,
        /// For a client that borrows memory: what others of the image have taught.
        learned: Option<Learned>,
    },
    /// Everything is loaded.
    Nothing,
}

impl Work {
    /// The work of a worker that has nothing of the client yet. The files are opened here, so that a missing file fails the
    /// restore now. A worker that cannot load beside the process loads everything first.
    pub(super) fn load(
        image: &Image,
        record: &Record,
        worker: &Worker,
        files: &impl Files,
        how: How,
        to_copy: Option<ToCopy>,
    ) -> Result<Self, RestoreError> {
        let mode = match how.mode {
            _ if !worker.loads_beside() => Mode::Whole,
            Mode::Ahead if !worker.runs_ahead() => Mode::Early,
            mode => mode,
        };
        let blob = image.encoded_client(record.index)?.to_vec();
        let load = Load::new(image.manifest(), (record, blob), files, How { mode, ..how })?;
        Ok(Self::Load(Load { to_copy, ..load }))
    }

    fn run(self, worker: &Worker) -> Result<(), WorkerError> {
        match self {
            Self::Load(load) => load.run(worker),
            Self::BringBack { limit, learned, .. } => {
                if let Some(learned) = learned {
                    worker.borrow(&learned, Timeout::WhileItWorks(limit))?;
                }
                match worker.call(&WorkerRequest::BringBack, &[], &[], Timeout::WhileItWorks(limit))?.reply {
                    WorkerReply::Done => Ok(()),
                    WorkerReply::Busy { what } => Err(WorkerError::Failed(Failure::new(FailureKind::Refused, what))),
                    _ => Err(WorkerError::Protocol("BringBack")),
                }
            }
            Self::Nothing => Ok(()),
        }
    }

    /// Whether the process may run before this is done, if the worker says so.
    fn may_run_ahead(&self) -> bool {
        matches!(self, Self::Load(Load { how: How { mode: Mode::Ahead, .. }, .. }))
    }

    /// Whether content is loaded when this is done, and whether the process may run meanwhile.
    fn then(&self, worker: &Worker) -> Then {
        match self {
            Self::Load(load) if load.how.mode.is_early() => Then::Beside,
            Self::BringBack { early: true, .. } => Then::Beside,
            Self::BringBack { early: false, .. } => Then::Wait,
            // All is loaded when this is done, and a worker that can tells how long that took.
            Self::Load(_) if worker.loads_beside() => Then::Wait,
            Self::Load(_) | Self::Nothing => Then::Over,
        }
    }
}

/// What follows the work.
enum Then {
    /// Content is loaded while the process may run.
    Beside,
    /// Content is loaded, and the process waits for it.
    Wait,
    Over,
}

/// Has every worker begin when it is promised its memory. The work is in the order of the clients. The pool starts spare workers again when all
/// memory is mapped; `until_loaded` lives until all is loaded.
pub(super) fn start(
    restore: &Arc<Restore>,
    works: Vec<Work>,
    limit: Limit,
    (promises, hold_off): (&Arc<Promises>, &Arc<HoldOff>),
    until_loaded: Option<Loading>,
) -> Result<(), RestoreError> {
    let until_loaded = Arc::new(until_loaded);
    for (place, (work, client)) in works.into_iter().zip(&restore.clients).enumerate() {
        let (name, worker) = (client.name.clone(), Arc::clone(&client.worker));
        let (restore, hold_off, until_loaded) = (Arc::clone(restore), Arc::clone(hold_off), Arc::clone(&until_loaded));
        let promises = Arc::clone(promises);
        thread("load", move || {
            let began = Instant::now();
            let then = work.then(&worker);
            let phases = restore.phases();
            let makes_memory = !matches!(work, Work::Nothing);
            let promise = makes_memory.then(|| Arc::new(promises.make(restore.record(place), &worker)));
            phases.load_begins(place, worker.pid());
            let held_off = Arc::new(Mutex::new(Some(hold_off)));
            worker.on_load_step({
                let (phases, promise, held_off) = (Arc::clone(phases), promise.clone(), Arc::clone(&held_off));
                let (restore, may_run_ahead) = (Arc::clone(&restore), work.may_run_ahead());
                move |step| {
                    promise.iter().for_each(|it| it.hears(step));
                    if step == ASSURED && may_run_ahead {
                        restore.assured(place);
                    }
                    if step == MEMORY_MAPPED {
                        lock(&held_off).take();
                    }
                    phases.step(place, step);
                }
            });
            let makes_beside = matches!(work, Work::Load(_));
            let mut result = work.run(&worker).map(|()| None);
            if result.is_err() || !makes_beside {
                promise.iter().for_each(|it| it.is_kept());
                lock(&held_off).take();
            }
            if result.is_ok() && !matches!(then, Then::Over) {
                if matches!(then, Then::Beside) {
                    restore.prepared(place);
                }
                let on_progress = |loaded, bytes| phases.content(place, loaded, bytes);
                result = wait_for_content(&worker, &name, limit, on_progress).map(Some);
            }
            worker.forget_load_steps();
            drop(promise);
            lock(&held_off).take();
            match &result {
                Ok(_) => {
                    let ms = began.elapsed().as_millis() as u64;
                    info!(worker = worker.pid(), ms, "phase load: {name}");
                }
                // The next `Resume` reports the error.
                Err(error) => debug!(worker = worker.pid(), "{name}: {error}"),
            }
            worker.was_restored(phases.began());
            restore.loaded(place, result);
            drop(until_loaded);
        })?;
    }
    Ok(())
}

/// Where the files of an image are.
pub(super) trait Files {
    /// Opens a data file for a worker.
    fn data(&self, file: DataFileName) -> Result<OwnedFd, RestoreError>;
    /// Opens a code file for a worker.
    fn code(&self, hash: CodeHash) -> Result<OwnedFd, RestoreError>;
}

impl Files for Image {
    fn data(&self, file: DataFileName) -> Result<OwnedFd, RestoreError> {
        Ok(self.data_file(file)?.into())
    }

    fn code(&self, hash: CodeHash) -> Result<OwnedFd, RestoreError> {
        Ok(self.code_file(hash)?.into())
    }
}

impl Files for Content {
    fn data(&self, file: DataFileName) -> Result<OwnedFd, RestoreError> {
        Ok(self.data_file(file)?.into())
    }

    fn code(&self, hash: CodeHash) -> Result<OwnedFd, RestoreError> {
        Ok(self.code_file(hash)?.into())
    }
}

/// The part of an image that one worker loads.
pub(in crate::daemon) struct Load {
    pub(in crate::daemon) hash: HashKey,
    pub(in crate::daemon) blob: Vec<u8>,
    /// The data files of the image, and of the images that it builds on.
    pub(in crate::daemon) data: Vec<(DataFile, OwnedFd)>,
    pub(in crate::daemon) code: Vec<CodeFile>,
    pub(in crate::daemon) how: How,
    /// What is on the GPU already.
    pub(in crate::daemon) to_copy: Option<ToCopy>,
}

/// A hash of code, and the file with the code.
pub(in crate::daemon) type CodeFile = (String, OwnedFd);

impl Load {
    /// `blob` is the client, encoded.
    pub(super) fn new(
        manifest: &Manifest,
        (record, blob): (&Record, Vec<u8>),
        files: &impl Files,
        how: How,
    ) -> Result<Self, RestoreError> {
        let data = record.data_files().into_iter();
        let data = data.map(|it| Ok((DataFile { depth: it.depth, index: it.index }, files.data(it)?)));
        Ok(Self {
            hash: manifest.hash_key,
            blob,
            data: data.collect::<Result<_, RestoreError>>()?,
            code: code_files(record, files)?,
            how,
            to_copy: None,
        })
    }

    pub(in crate::daemon) fn run(self, worker: &Worker) -> Result<(), WorkerError> {
        let timeout = Timeout::WhileItWorks(self.how.limit);
        if let Some(it) = &self.to_copy {
            it.tell(worker, timeout)?;
        }
        // The last message has room for the rest of both lists.
        let (data_before, data) = split(&self.data, 0);
        for files in data_before.chunks(MAX_FDS) {
            let request = WorkerRequest::Data { data: files.iter().map(|it| it.0).collect() };
            worker.ask(&request, &sys::raw(files.iter().map(|it| &it.1)), timeout)?;
        }
        let (code_before, code) = split(&self.code, data.len());
        worker.send_code(code_before, timeout)?;
        let (hash_algorithm, hash_key) = self.hash.to_parts();
        let fds = data.iter().map(|it| &it.1).chain(code.iter().map(|it| &it.1));
        let request = WorkerRequest::Load {
            data: data.iter().map(|it| it.0).collect(),
            hash_algorithm,
            hash_key,
            code: code.iter().map(|it| it.0.clone()).collect(),
            limits: self.how.limits,
            rehearsal: false,
            early: self.how.mode.is_early(),
            warm: self.how.mode == Mode::Warm,
            steps: true,
        };
        worker.ask_with(&request, &self.blob, &sys::raw(fds), timeout)
    }
}

/// The code of a client, in files for its worker.
pub(super) fn code_files(record: &Record, files: &impl Files) -> Result<Vec<CodeFile>, RestoreError> {
    check::code_of(record).into_iter().map(|hash| Ok((hash.to_string(), files.code(hash)?))).collect()
}

/// Splits a list into what goes ahead in messages of its own, and a rest that fits into a message with `taken` places.
fn split<T>(all: &[T], taken: usize) -> (&[T], &[T]) {
    all.split_at(all.len() - all.len().min(MAX_FDS.saturating_sub(taken)))
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
            assert!(last.len() + taken <= MAX_FDS);
            assert_eq!(before.chunks(MAX_FDS).len(), messages, "{count} {taken}");
            assert_eq!(before.iter().chain(last).copied().collect::<Vec<_>>(), all);
        }
    }
}

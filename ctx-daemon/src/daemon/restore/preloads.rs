//! What is loaded for restores to come (`preload.rs`), and what workers copy of it.

use std::sync::{Arc, Mutex};

use rekindle_images::{Checksum, Client as Record, Image};
use rekindle_wire::control::WorkerRequest;
use tracing::{info, warn};

use super::super::grants::Uuid;
use super::super::lock;
use super::super::spawn::Settings;
use super::super::worker::{Pieces, Timeout, Worker, WorkerError};
use super::check;

/// What is loaded for restores to come, by the connections that have asked for it. The driver takes a while to free what goes: nobody holds
/// the lock meanwhile.
#[derive(Default)]
pub(in crate::daemon) struct Preloads(Mutex<Vec<Preloaded>>);

/// The GPU memory of an image.
pub(super) struct Preloaded {
    /// The number of the connection that has asked for it.
    pub(super) asker: u64,
    pub(super) manifest_hash: Checksum,
    pub(super) clients: Vec<Arc<ClientMemory>>,
    /// Workers that have their code.
    pub(super) ready: Vec<Ready>,
}

/// The GPU memory of one client.
pub(super) struct ClientMemory {
    /// The client, by its number here and by its own, on the host of the dump.
    pub(super) pids: (u32, u32),
    /// The GPUs that have it; none where a worker sees all.
    pub(super) gpus: Option<Vec<Uuid>>,
    pub(super) pieces: Pieces,
}

/// What a worker is to copy, if it has the wanted content.
pub(in crate::daemon) struct ToCopy(Arc<ClientMemory>);

impl ToCopy {
    /// Tells a worker that is about to load. A worker that cannot copy it loads all.
    pub(super) fn tell(&self, worker: &Worker, timeout: Timeout) -> Result<(), WorkerError> {
        let told = worker.ask(&WorkerRequest::CopyTemplate, &[], timeout);
        match told.and_then(|()| worker.take_template(&self.0.pieces, timeout)) {
            Err(WorkerError::Failed(why)) => {
                warn!(worker = worker.pid(), "what was loaded in advance is loaded once more: {why}");
                Ok(())
            }
            told => told,
        }
    }

    /// Bytes of physical memory on a device.
    pub(super) fn bytes_on(&self, device: usize) -> u64 {
        let here = self.0.pieces.iter().filter(|(piece, _)| piece.device as usize == device);
        here.map(|(piece, _)| piece.size).sum()
    }
}

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
    /// A worker with these settings, which sees these GPUs, for the client that [`pids`] names.
    pub(super) fn new(pids: (u32, u32), settings: Settings, gpus: Option<Vec<Uuid>>, worker: Arc<Worker>) -> Self {
        Self { pids, settings, gpus, worker: Some(worker) }
    }

    /// The worker, if it is one for this client with these settings and GPUs. It may still be loading code: its requests wait for that.
    pub(super) fn take(&mut self, record: &Record, settings: &Settings, gpus: Option<&[Uuid]>) -> Option<Arc<Worker>> {
        let is_it = self.pids == pids(record) && self.settings == *settings && self.gpus.as_deref() == gpus;
        self.worker.take_if(|worker| is_it && !worker.is_dead())
    }
}

impl Preloads {
    /// What the workers of a restore of this image with these GPUs can copy, by the places of its clients. It is theirs.
    pub(super) fn take(&self, image: &Image, gpus: &[Option<Vec<Uuid>>]) -> Vec<Option<ToCopy>> {
        let mut all = lock(&self.0);
        let found = of(&all, image, gpus);
        let _taken: Vec<_> = all.extract_if(.., |it| image.depth_of(it.manifest_hash).is_some()).collect();
        drop(all);
        found
    }

    /// The same; it stays.
    pub(super) fn find(&self, image: &Image, gpus: &[Option<Vec<Uuid>>]) -> Vec<Option<ToCopy>> {
        of(&lock(&self.0), image, gpus)
    }

    /// A worker that has the code of this client of an image. It is the restore's.
    pub(super) fn take_worker(
        &self,
        image: &Image,
        record: &Record,
        settings: &Settings,
        gpus: Option<&[Uuid]>,
    ) -> Option<Arc<Worker>> {
        let mut all = lock(&self.0);
        let below = all.iter_mut().filter(|it| image.depth_of(it.manifest_hash).is_some());
        below.flat_map(|it| &mut it.ready).find_map(|it| it.take(record, settings, gpus))
    }

    /// Puts this in the place of what the same connection has asked for before. Workers that have code stay.
    pub(super) fn put(&self, mut preloaded: Preloaded) {
        let mut all = lock(&self.0);
        let mut former: Vec<_> = all.extract_if(.., |it| it.asker == preloaded.asker).collect();
        preloaded.ready.extend(former.iter_mut().flat_map(|it| std::mem::take(&mut it.ready)));
        all.push(preloaded);
        drop(all);
    }

    /// Adds a worker that has code, or is about to. Where what the connection has asked for has gone meanwhile, it ends.
    pub(super) fn put_worker(&self, asker: u64, ready: Ready) {
        if let Some(it) = lock(&self.0).iter_mut().find(|it| it.asker == asker) {
            it.ready.push(ready);
        }
    }

    pub(super) fn forget(&self, asker: u64) {
        let _all: Vec<_> = lock(&self.0).extract_if(.., |it| it.asker == asker).collect();
    }

    /// A program finds no memory: all that is loaded in advance goes. Returns whether there was any.
    pub(in crate::daemon) fn give_way(&self) -> bool {
        let all = std::mem::take(&mut *lock(&self.0));
        if !all.is_empty() {
            info!("what was loaded in advance goes: a program needs the memory");
        }
        !all.is_empty()
    }
}

/// What the clients of an image can copy, by their places: of the nearest image that it builds on.
fn of(all: &[Preloaded], image: &Image, gpus: &[Option<Vec<Uuid>>]) -> Vec<Option<ToCopy>> {
    let below = all.iter().filter_map(|it| Some((image.depth_of(it.manifest_hash)?, it)));
    let Some((_, preloaded)) = below.min_by_key(|(depth, _)| *depth) else { return Vec::new() };
    let clients = check::attached(image.manifest()).zip(gpus);
    clients.map(|(record, gpus)| preloaded.of(record, gpus.as_deref())).collect()
}

impl Preloaded {
    fn of(&self, record: &Record, gpus: Option<&[Uuid]>) -> Option<ToCopy> {
        // Content on other GPUs would cross a link as well.
        let is_it = |it: &&Arc<ClientMemory>| it.pids == pids(record) && it.gpus.as_deref() == gpus;
        self.clients.iter().find(is_it).map(|it| ToCopy(Arc::clone(it)))
    }
}

/// By which a client is known.
pub(super) fn pids(record: &Record) -> (u32, u32) {
    (record.pid, record.namespace_pid)
}

//! Content of GPU memory that is loaded before there is an image to restore: a tree is about to come from another host, and runs there
//! meanwhile.
//!
//! ```text
//!   Preload{image of round 0} ─► a worker loads it, exports the memory and ends ─► Preloaded
//!   Preload{image of round k} ─► the same; what has not changed is copied on the GPU, and the older memory goes
//!   Restore{image that builds on one of these} ─► takes it: its workers copy what has not changed since (`CopyTemplate`), load
//!                                                 the rest, and compare the hashes of all
//!   the connection closes ─► the memory goes
//! ```
//!
//! Until a restore has loaded everything, the GPU has the content twice. So nothing is loaded where there is no room for both, and a restore
//! that finds no room beside what was loaded does without.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rekindle_images::{Checksum, Client as Record, Image, ImageDir, Manifest};
use rekindle_wire::control::{Failure, PreloadInfo, Reply, Request, WorkerRequest};
use rekindle_wire::frame;
use tracing::{debug, info, warn};

use super::super::grants::Uuid;
use super::super::message::{self, MAX_REQUEST};
use super::super::worker::{Timeout, Worker, WorkerError};
use super::super::{Daemon, lock, sys};
use super::advance::{Pieces, Workers};
use super::check;
use super::error::RestoreError;
use super::load::Mode;

/// What is loaded for restores to come, by the connections that have asked for it.
#[derive(Default)]
pub(in crate::daemon) struct Preloads(Mutex<Vec<Preloaded>>);

/// The GPU memory of an image.
struct Preloaded {
    /// The number of the connection that has asked for it.
    asker: u64,
    manifest_hash: Checksum,
    clients: Vec<Arc<Content>>,
}

/// The content of one client.
pub(super) struct Content {
    /// The client, by its number here and by its own, on the host of the dump.
    pids: (u32, u32),
    /// The GPUs that have it; none where a worker sees all.
    gpus: Option<Vec<Uuid>>,
    pieces: Pieces,
}

/// What a worker is to copy, as far as it lies in files of this depth.
pub(in crate::daemon) struct Copied {
    content: Arc<Content>,
    depth: u32,
}

impl Copied {
    /// Tells a worker that is about to load. A worker that cannot copy it loads all.
    pub(super) fn tell(&self, worker: &Worker, timeout: Timeout) -> Result<(), WorkerError> {
        let request = WorkerRequest::CopyTemplate { depth: self.depth };
        let told =
            worker.ask(&request, &[], timeout).and_then(|()| worker.take_template(&self.content.pieces, timeout));
        match told {
            Err(WorkerError::Failed(why)) => {
                warn!(worker = worker.pid(), "what was loaded in advance is loaded once more: {why}");
                Ok(())
            }
            told => told,
        }
    }
}

impl Preloads {
    /// What the workers of a restore of this image with these GPUs can copy, by the places of its clients. It is theirs.
    pub(super) fn take(&self, image: &Image, gpus: &[Option<Vec<Uuid>>]) -> Vec<Option<Copied>> {
        let mut all = lock(&self.0);
        let copied = of(&all, image, gpus);
        all.retain(|it| image.depth_of(it.manifest_hash).is_none());
        copied
    }

    /// The same; it stays.
    fn find(&self, image: &Image, gpus: &[Option<Vec<Uuid>>]) -> Vec<Option<Copied>> {
        of(&lock(&self.0), image, gpus)
    }

    /// Puts this in the place of what the same connection has asked for before.
    fn put(&self, preloaded: Preloaded) {
        let mut all = lock(&self.0);
        all.retain(|it| it.asker != preloaded.asker);
        all.push(preloaded);
    }

    fn forget(&self, asker: u64) {
        lock(&self.0).retain(|it| it.asker != asker);
    }
}

/// What the clients of an image can copy, by their places.
fn of(all: &[Preloaded], image: &Image, gpus: &[Option<Vec<Uuid>>]) -> Vec<Option<Copied>> {
    let found = all.iter().find_map(|it| Some((it, image.depth_of(it.manifest_hash)?)));
    let Some((preloaded, depth)) = found else { return Vec::new() };
    let clients = check::attached(image.manifest()).zip(gpus);
    clients.map(|(record, gpus)| preloaded.of(record, gpus.as_deref(), depth)).collect()
}

impl Preloaded {
    fn of(&self, record: &Record, gpus: Option<&[Uuid]>, depth: u32) -> Option<Copied> {
        // Content on other GPUs would cross a link as well.
        let is_it = |it: &&Arc<Content>| it.pids == pids(record) && it.gpus.as_deref() == gpus;
        self.clients.iter().find(is_it).map(|it| Copied { content: Arc::clone(it), depth })
    }
}

fn pids(record: &Record) -> (u32, u32) {
    (record.pid, record.namespace_pid)
}

/// A connection that asks for content.
struct Asker<'a> {
    daemon: &'a Daemon,
    number: u64,
}

impl Drop for Asker<'_> {
    fn drop(&mut self) {
        self.daemon.preloads.forget(self.number);
    }
}

/// Serves a connection whose first request is `Preload`, until it closes.
pub(in crate::daemon) fn serve(daemon: &Daemon, stream: &UnixStream, mut fds: Vec<OwnedFd>) {
    let _session = match daemon.connections.session(stream) {
        Ok(session) => session,
        Err(error) => return message::fail(stream, error),
    };
    let asker = match sys::random() {
        Ok(number) => Asker { daemon, number },
        Err(error) => return message::fail(stream, RestoreError::from(error)),
    };
    loop {
        let began = Instant::now();
        match preload(daemon, asker.number, fds) {
            Ok((bytes, copied)) => {
                let ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
                info!(bytes, copied, ms, "loaded in advance");
                message::reply(stream, &Reply::Preloaded(PreloadInfo { bytes, copied, ms }));
            }
            Err(error) => {
                info!("not loaded in advance: {error}");
                message::fail(stream, error);
            }
        }
        match frame::receive_at_most::<Request>(stream, MAX_REQUEST, 0) {
            Ok(message) if matches!(message.body, Request::Preload) => fds = message.fds,
            Ok(_) => return message::fail(stream, Failure::refused("nothing but Preload follows Preload")),
            Err(closed) => return debug!("what was loaded in advance goes: {closed}"),
        }
    }
}

/// Loads the content of an image, and keeps it. Returns its bytes, and how many of them were on the GPU before.
fn preload(daemon: &Daemon, asker: u64, fds: Vec<OwnedFd>) -> Result<(u64, u64), RestoreError> {
    let [dir] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| RestoreError::NoDirectory)?;
    let image = Image::open_at(ImageDir::from_fd(dir.as_fd(), message::shown(&dir))?)?;
    check::image(&image)?;
    check::code(&image)?;
    let manifest = image.manifest();
    daemon.pool.wait_for_restores();
    let workers = Workers::take(daemon, manifest)?;
    let loaded = load(daemon, &workers, &image);
    workers.end();
    let (clients, sum) = loaded?;
    daemon.preloads.put(Preloaded { asker, manifest_hash: image.manifest_hash(), clients });
    Ok(sum)
}

fn load(daemon: &Daemon, workers: &Workers, image: &Image) -> Result<(Vec<Arc<Content>>, (u64, u64)), RestoreError> {
    let manifest = image.manifest();
    // After an error it is still of use.
    let older = daemon.preloads.find(image, &workers.gpus);
    let held = older.iter().flatten().flat_map(|it| &it.content.pieces).map(|(piece, _)| piece.size).sum();
    // Beside the older content now, and beside the client's memory when the older content has gone.
    let wanted = |needed: u64| needed.saturating_mul(2).saturating_sub(held).max(needed);
    if let Some((needed, free)) = shortage(manifest, &workers.all, wanted) {
        return Err(RestoreError::NoRoomInAdvance { needed, free });
    }
    let times = workers.fill(daemon, manifest, image, Mode::Early, older)?;
    let exported = workers.export(daemon, manifest)?;
    let clients = check::attached(manifest).zip(&workers.gpus).zip(exported);
    let content =
        clients.map(|((record, gpus), pieces)| Arc::new(Content { pids: pids(record), gpus: gpus.clone(), pieces }));
    let sum = times.iter().fold((0, 0), |sum, it| (sum.0 + it.bytes, sum.1 + it.copied));
    Ok((content.collect(), sum))
}

/// The first GPU on which less is free than the clients need, `wanted` of their bytes: how much is wanted, and how much is free. None where
/// there is room, or where that is not known.
pub(super) fn shortage(
    manifest: &Manifest,
    workers: &[Arc<Worker>],
    wanted: impl Fn(u64) -> u64,
) -> Option<(u64, u64)> {
    let mut all: HashMap<Uuid, (u64, u64)> = HashMap::new();
    for (record, worker) in check::attached(manifest).zip(workers) {
        let memory = worker.memory().ok()?;
        for (ordinal, (device, memory)) in worker.attached().devices.iter().zip(memory).enumerate() {
            let here = record.allocations.iter().filter(|it| it.device as usize == ordinal);
            let (needed, free) = all.entry(device.uuid).or_insert((0, memory.free));
            *needed = here.fold(*needed, |sum, it| sum.saturating_add(it.size));
            *free = memory.free.min(*free);
        }
    }
    let lacking = |(needed, free): (u64, u64)| (wanted(needed), free);
    all.into_values().map(lacking).find(|(wanted, free)| wanted > free)
}

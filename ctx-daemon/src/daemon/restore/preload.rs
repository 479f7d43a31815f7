//! Content of GPU memory that is loaded before there is an image to restore: a tree is about to come from another host, and runs there
//! meanwhile.
//!
//! ```text
//!   Preload{image of round 0} ─► a worker loads it, exports the memory and ends ─► Preloaded
//!   Preload{image of round k} ─► the same; what is on the GPU already is copied there, and the older memory goes
//!   then workers load its code (`code_ahead.rs`)
//!   Restore{image that builds on one of these} ─► takes both: its workers copy what has the wanted hash (`CopyTemplate`), and load
//!                                                 the rest
//!   the connection closes, or a program finds no memory ─► the memory goes
//! ```
//!
//! Until a restore has loaded everything, the GPU has the content twice. So nothing is loaded where there is no room for both, and a restore
//! that finds no room beside what was loaded does without.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rekindle_images::{Image, ImageDir};
use rekindle_wire::control::{Failure, PreloadInfo, Reply, Request};
use rekindle_wire::frame;
use tracing::{debug, info};

use super::super::grants::Uuid;
use super::super::message::{self, MAX_REQUEST};
use super::super::worker::Worker;
use super::super::{Daemon, sys};
use super::advance::Workers;
use super::check;
use super::code_ahead;
use super::error::RestoreError;
use super::load::Mode;
use super::preloads::{ClientMemory, Preloaded, ToCopy, pids};
use super::room::shortage;

/// How often a load looks whether anybody still waits for it.
const LOOK: Duration = Duration::from_millis(20);

/// What the workers of a restore, which see these GPUs, copy. None of it if they would find no room beside it.
pub(super) fn take(
    daemon: &Daemon,
    image: &Image,
    workers: &[Arc<Worker>],
    gpus: &[Option<Vec<Uuid>>],
) -> Vec<Option<ToCopy>> {
    let found = daemon.preloads.take(image, gpus);
    if found.is_empty() {
        return found;
    }
    match shortage(image.manifest(), workers, &found, |needed, held| needed.max(held)) {
        None => found,
        Some((needed, free)) => {
            info!(needed, free, "what was loaded in advance makes room");
            Vec::new()
        }
    }
}

/// A connection that asks for content.
struct Asker<'a> {
    daemon: &'a Daemon,
    stream: &'a UnixStream,
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
        Ok(number) => Asker { daemon, stream, number },
        Err(error) => return message::fail(stream, RestoreError::from(error)),
    };
    std::thread::scope(|scope| {
        let mut is_first = true;
        loop {
            let began = Instant::now();
            match asker.preload(fds) {
                Ok((image, (bytes, copied))) => {
                    let ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
                    info!(bytes, copied, ms, "loaded in advance");
                    message::reply(stream, &Reply::Preloaded(PreloadInfo { bytes, copied, ms }));
                    // Later images hardly have more code. The next round does not wait for it.
                    if std::mem::take(&mut is_first) {
                        scope.spawn(|| asker.load_code(image));
                    }
                }
                Err(error) => {
                    info!("not loaded in advance: {error}");
                    message::fail(stream, error);
                }
            }
            match frame::receive_at_most::<Request>(stream, MAX_REQUEST, 0) {
                Ok(message) if matches!(message.body, Request::Preload) => fds = message.fds,
                Ok(_) => {
                    message::fail(stream, Failure::refused("nothing but Preload follows Preload"));
                    break;
                }
                Err(closed) => {
                    debug!("what was loaded in advance goes: {closed}");
                    break;
                }
            }
        }
        // Ends workers that load code, and with them that thread.
        daemon.preloads.forget(asker.number);
    });
}

impl Asker<'_> {
    /// Loads the content of an image, and keeps it. Returns the image, its bytes, and how many of them were on the GPU before.
    fn preload(&self, fds: Vec<OwnedFd>) -> Result<(Image, (u64, u64)), RestoreError> {
        let daemon = self.daemon;
        let [dir] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| RestoreError::NoDirectory)?;
        let image = Image::open_at(ImageDir::from_fd(dir.as_fd(), message::shown(&dir))?)?;
        check::image(&image)?;
        daemon.pool.wait_for_restores();
        let workers = Workers::take(daemon, image.manifest())?;
        let is_over = AtomicBool::new(false);
        let loaded = std::thread::scope(|scope| {
            scope.spawn(|| self.end_if_nobody_waits(&workers, &is_over));
            let loaded = load(daemon, &workers, &image);
            is_over.store(true, Ordering::Relaxed);
            loaded
        });
        // Their own memory is free when they have ended.
        workers.end_and_wait();
        let (clients, sum) = loaded?;
        let (asker, manifest_hash) = (self.number, image.manifest_hash());
        daemon.preloads.put(Preloaded { asker, manifest_hash, clients, ready: Vec::new() });
        Ok((image, sum))
    }

    /// Has workers load the code of an image's clients.
    fn load_code(&self, image: Image) {
        let Self { daemon, number, .. } = *self;
        if let Err(error) = code_ahead::load(daemon, &image, |ready| daemon.preloads.put_worker(number, ready)) {
            info!("code is not loaded in advance: {error}");
        }
    }

    /// Ends the workers, and with them the load, if the peer closes its connection or the daemon stops.
    fn end_if_nobody_waits(&self, workers: &Workers, is_over: &AtomicBool) {
        while !is_over.load(Ordering::Relaxed) {
            // A peer that waits says nothing.
            let is_gone = sys::wait_readable([self.stream.as_fd()], Some(LOOK)).is_ok_and(|it| it[0]);
            if is_gone || self.daemon.is_stopping() {
                return workers.end();
            }
        }
    }
}

/// The memory of clients, and its bytes, with those that were on the GPU before.
type Loaded = (Vec<Arc<ClientMemory>>, (u64, u64));

fn load(daemon: &Daemon, workers: &Workers, image: &Image) -> Result<Loaded, RestoreError> {
    let manifest = image.manifest();
    // After an error it is still of use.
    let older = daemon.preloads.find(image, &workers.gpus);
    // Beside the older content now, and beside the clients' memory when the older content has gone.
    let wanted = |needed: u64, held: u64| needed.saturating_mul(2).saturating_sub(held).max(needed);
    if let Some((needed, free)) = shortage(manifest, &workers.all, &older, wanted) {
        return Err(RestoreError::NoRoomInAdvance { needed, free });
    }
    let times = workers.fill(daemon, manifest, image, Mode::Early, older)?;
    let exported = workers.export(daemon, manifest)?;
    let clients = check::attached(manifest).zip(&workers.gpus).zip(exported);
    let memory = clients
        .map(|((record, gpus), pieces)| Arc::new(ClientMemory { pids: pids(record), gpus: gpus.clone(), pieces }));
    let sum = times.iter().fold((0, 0), |sum, it| (sum.0 + it.bytes, sum.1 + it.copied));
    Ok((memory.collect(), sum))
}

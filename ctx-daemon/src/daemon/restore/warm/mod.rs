//! Warm images: the operator has an image kept ready for restores (`rekindle warm`).
//!
//! | a restore of | finds |
//! |---|---|
//! | any warm image | its files in host memory, all content compared with its hashes |
//! | the first `copies` at a time | workers that have loaded code and objects; memory is made and filled when the restore begins |
//! | these, of a resident image | workers that have the content of GPU memory too, that copy it from a template on the GPU, or that borrow the template's memory |
//!
//! A restore finds a warm image by the checksum of its manifest, in whatever directory the image lies. That names all content by
//! its hashes, so what is loaded is what the image says. Only who may restore at all gets that far.

mod content;
mod error;
mod images;
mod keep;
mod lessons;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rekindle_images::{Image, ImageDir, Manifest};
use rekindle_wire::control::{Reply, Resident};
use tracing::{info, warn};

pub(in crate::daemon) use self::content::Content;
pub(in crate::daemon) use self::error::WarmError;
use self::images::WarmImage;
pub(in crate::daemon) use self::images::{Loading, Wanted, WarmImages};
use super::super::host_memory::{NoRoom, Room};
use super::super::{Daemon, message, sys};
use super::check;

/// How long workers may take to close the files of an image that is forgotten, and how often this looks.
const MEMORY_RETURNS: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(20);

/// Keeps the image in the directory warm, or changes how. Answers when workers wait for restores of it, or cannot.
pub(in crate::daemon) fn warm(daemon: &Arc<Daemon>, stream: &UnixStream, wanted: Wanted, fds: Vec<OwnedFd>) -> Reply {
    let warmed = try_warm(daemon, wanted, fds);
    match warmed {
        Ok(image) => {
            // A peer that does not wait any more closes its connection.
            image.wait_until_ready(|| {
                let is_gone = sys::wait_readable([stream.as_fd()], Some(Duration::ZERO)).is_ok_and(|it| it[0]);
                !is_gone && !daemon.is_stopping()
            });
            Reply::Warm(vec![image.info()])
        }
        Err(error) => failed(error),
    }
}

/// Lists the warm images.
pub(in crate::daemon) fn list(daemon: &Daemon) -> Reply {
    Reply::Warm(daemon.warm.infos())
}

/// Keeps the image in the directory warm no longer.
pub(in crate::daemon) fn forget(daemon: &Daemon, fds: Vec<OwnedFd>) -> Reply {
    let forgotten = open(fds).and_then(|image| match daemon.warm.forget(image.manifest_hash()) {
        true => Ok(()),
        false => Err(WarmError::NotWarm),
    });
    match forgotten {
        Ok(()) => list(daemon),
        Err(error) => failed(error),
    }
}

/// Keeps the images with this id, or from this directory, warm no longer.
pub(in crate::daemon) fn forget_named(daemon: &Daemon, name: &str) -> Reply {
    if daemon.warm.forget_named(name) { list(daemon) } else { failed(WarmError::Unknown(name.to_owned())) }
}

fn failed(error: WarmError) -> Reply {
    warn!("not warm: {error}");
    Reply::Failed(error.into())
}

fn open(fds: Vec<OwnedFd>) -> Result<Image, WarmError> {
    let [dir] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| WarmError::NoDirectory)?;
    Ok(Image::open_at(ImageDir::from_fd(dir.as_fd(), message::shown(&dir))?)?)
}

/// Whether the image's processes may share memory with other instances of them: whoever owns them has said so, or they are of no
/// container. Processes of one image outside containers have one user.
fn may_share(manifest: &Manifest) -> Result<(), WarmError> {
    let mut grants = manifest.clients.iter().filter_map(|it| it.grant.as_ref());
    match grants.find(|it| !it.share) {
        Some(grant) => Err(WarmError::NotToBeShared(grant.container.clone())),
        None => Ok(()),
    }
}

/// Sets host memory aside. Waits a while for that of images that have just been forgotten.
fn room_for(bytes: u64, evicted: bool) -> Result<Room, NoRoom> {
    let began = Instant::now();
    loop {
        match Room::new(bytes) {
            Err(NoRoom::TooLittle { .. }) if evicted && began.elapsed() < MEMORY_RETURNS => std::thread::sleep(LOOK),
            room => return room,
        }
    }
}

fn try_warm(daemon: &Arc<Daemon>, wanted: Wanted, fds: Vec<OwnedFd>) -> Result<Arc<WarmImage>, WarmError> {
    let image = open(fds)?;
    check::image(&image)?;
    if wanted.resident == Some(Resident::Shared) {
        may_share(image.manifest())?;
    }
    if let Some(known) = daemon.warm.find(&image) {
        known.wants(wanted);
        return Ok(known);
    }
    let bytes = Content::size(&image)?;
    let reserved = daemon.warm.reserve(bytes)?;
    let room = room_for(bytes, reserved.evicted).map_err(|error| match error {
        NoRoom::TooLittle { free } => WarmError::NoMemory { needed: bytes, free },
        NoRoom::Unknown(error) => WarmError::Memory(error),
    })?;
    check::code(&image)?;
    let content = Content::copy(&image, &room)?;
    let made = Arc::new(WarmImage::new(&image, content, bytes, wanted, &daemon.config.state_dir));
    let known = daemon.warm.add(reserved, Arc::clone(&made));
    if Arc::ptr_eq(&known, &made) {
        info!(image = %image.manifest().id, bytes, "the image is in host memory");
        if let Err(error) = keep::start(daemon, &known) {
            daemon.warm.forget(image.manifest_hash());
            return Err(WarmError::Thread(error));
        }
    } else {
        known.wants(wanted);
    }
    Ok(known)
}

//! The end of a protection at a user's wish.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::anyhow;

use super::folder::Folder;
use crate::failure::Failure;
use crate::output;

const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long a supervisor may be in the middle of something.
const PATIENCE: Duration = Duration::from_secs(600);

/// Stops a protection: the job is left alone, and the images are kept.
pub(super) fn stop(all: &Path, name: &str) -> Result<(), Failure> {
    let folder = find(all, name)?;
    let name = folder.name();
    folder.wish_stop()?;
    let began = Instant::now();
    loop {
        let record = folder.record()?;
        if record.phase.is_final() {
            let images = record.shelf.good().count();
            let dir = record.wishes.images.display();
            return Ok(output::print(&format!("{name} is {}; {images} images are in {dir}\n", record.phase.name()))?);
        }
        if folder.supervisor().is_none() && folder.guard().is_none() {
            return Err(Failure::refused(anyhow!(
                "nobody supervises {name}: `rekindle protect --supervise {name}` ends it now"
            )));
        }
        if began.elapsed() > PATIENCE {
            return Err(
                anyhow!("the supervisor of {name} does not answer: its log is in {}", folder.path().display()).into()
            );
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Removes a protection that has come to its end, and its images.
pub(super) fn forget(all: &Path, name: &str) -> Result<(), Failure> {
    let folder = find(all, name)?;
    let record = folder.record()?;
    if !record.phase.is_final() {
        let name = folder.name();
        return Err(Failure::refused(anyhow!("{name} is {}: stop it first", record.phase.name())));
    }
    // Its supervisor may still be uploading an image.
    let _lock = folder.lock()?;
    if record.wishes.images.exists() {
        fs::remove_dir_all(&record.wishes.images)
            .map_err(|error| anyhow!("cannot remove {}: {error}", record.wishes.images.display()))?;
    }
    Ok(folder.remove()?)
}

/// The protection with this name, or of this process or container.
fn find(all: &Path, name: &str) -> Result<Folder, Failure> {
    let folder = Folder::named(all, name)?;
    if folder.path().exists() {
        return Ok(folder);
    }
    let pid = name.parse().ok();
    let is_of = |it: &Folder| {
        it.record().is_ok_and(|it| match it.wishes.container {
            Some(container) => container.name == name,
            None => pid.is_some() && it.job.map(|it| it.pid) == pid,
        })
    };
    let found = Folder::all(all)?.into_iter().rfind(is_of);
    found.ok_or_else(|| Failure::refused(anyhow!("there is no protection {name}: `rekindle protect --list` shows all")))
}

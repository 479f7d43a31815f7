//! The copies of images in stores. A thread makes one at a time, beside the job and its checkpoints; the newest image counts. A store
//! keeps as many images as the directory does.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use rekindle_images::Image as OnDisk;
use rekindle_protect::Record;

use super::images::Images;
use super::verbs::Verbs;

/// What has become of an upload.
#[derive(Default)]
pub(super) struct Uploaded {
    pub(super) number: u64,
    pub(super) url: String,
    /// Whether the store has the image.
    pub(super) stored: bool,
    /// Images that the store does not have any more.
    pub(super) removed: Vec<u64>,
    /// What has failed.
    pub(super) said: Vec<String>,
}

/// The upload that runs, if one does.
#[derive(Default)]
pub(super) struct Uploads {
    running: Option<JoinHandle<Uploaded>>,
}

impl Uploads {
    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Begins to upload an image to a store.
    pub(super) fn begin(&mut self, protection: &str, record: &Record, verbs: &Arc<Verbs>, number: u64, url: String) {
        let protection = protection.to_owned();
        let dir = Images::of(record, verbs).dir(number);
        let old = record.copies.dispensable(number, &url, record.wishes.keep);
        let verbs = Arc::clone(verbs);
        self.running = Some(std::thread::spawn(move || upload(&verbs, &protection, number, &dir, url, &old)));
    }

    /// The upload, if it has ended.
    pub(super) fn ended(&mut self) -> Option<Uploaded> {
        self.running.as_ref().filter(|it| it.is_finished())?;
        self.wait()
    }

    /// Waits for the upload, if one runs.
    pub(super) fn wait(&mut self) -> Option<Uploaded> {
        self.running.take()?.join().ok()
    }
}

/// The newest image, and the first store that does not have it. A store that cannot be reached is tried again with the next image.
pub(super) fn next(record: &Record) -> Option<(u64, String)> {
    let number = record.shelf.newest()?.number;
    let url = record.wishes.stores.iter().find(|url| !record.copies.has(number, url))?;
    Some((number, url.clone()))
}

fn upload(verbs: &Verbs, protection: &str, number: u64, dir: &Path, url: String, old: &[u64]) -> Uploaded {
    let name = |number: u64| format!("{protection}-{number:06}");
    let mut done = Uploaded { number, ..Uploaded::default() };
    match verbs.upload(dir, &url, &name(number)) {
        Ok(()) => done.stored = true,
        // A former supervisor has begun it, and has been killed.
        Err(_) if is_there(verbs, dir, &url, &name(number)) => done.stored = true,
        Err(failed) => done.said.push(failed.why),
    }
    if done.stored {
        for number in old {
            match verbs.remove_stored(&url, &name(*number)) {
                Ok(()) => done.removed.push(*number),
                // It was never there, or somebody has removed it.
                Err(_) if verbs.stored(&url).is_ok_and(|it| !it.contains_key(&name(*number))) => {
                    done.removed.push(*number)
                }
                Err(failed) => done.said.push(failed.why),
            }
        }
        if !done.removed.is_empty()
            && let Err(failed) = verbs.collect(&url)
        {
            done.said.push(failed.why);
        }
    }
    Uploaded { url, ..done }
}

/// Whether the store has this image under this name. Another host may use the same names.
fn is_there(verbs: &Verbs, dir: &Path, url: &str, name: &str) -> bool {
    let Ok(image) = OnDisk::open(dir) else { return false };
    verbs.stored(url).is_ok_and(|it| it.get(name) == Some(&image.manifest().id.to_string()))
}

//! The copies of images in stores. A thread makes one at a time, beside the job and its checkpoints; the newest image counts. A store
//! keeps as many images as the directory does.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

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

    /// Begins to upload the newest image to the first store that does not have it. A store that cannot be reached is tried again with
    /// the next image.
    pub(super) fn begin(&mut self, protection: &str, record: &Record, verbs: &Arc<Verbs>) {
        let Some(newest) = record.shelf.newest() else { return };
        let Some(url) = record.wishes.stores.iter().find(|it| !newest.stored.contains(it)).cloned() else { return };
        let (number, protection) = (newest.number, protection.to_owned());
        let dir = Images::of(record, verbs).dir(number);
        // With the new one there are as many as are kept.
        let old = record.shelf.dispensable_in(&url, record.wishes.keep.max(2) - 1);
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

fn upload(verbs: &Verbs, protection: &str, number: u64, dir: &Path, url: String, old: &[u64]) -> Uploaded {
    let name = |number: u64| format!("{protection}-{number:06}");
    let mut done = Uploaded { number, ..Uploaded::default() };
    match verbs.upload(dir, &url, &name(number)) {
        Ok(()) => done.stored = true,
        // A former supervisor has begun it, and has been killed.
        Err(_) if verbs.is_stored(&url, &name(number)) => done.stored = true,
        Err(failed) => done.said.push(failed.why),
    }
    if done.stored {
        for number in old {
            match verbs.remove_stored(&url, &name(*number)) {
                Ok(()) => done.removed.push(*number),
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

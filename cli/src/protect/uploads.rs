//! The copies of images in stores. A thread makes one at a time, beside the job and its checkpoints.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use rekindle_images::Image as OnDisk;
use rekindle_protect::{Level, Record};
use rekindle_stores::Archive;

use super::images::Images;
use super::verbs::Verbs;

/// The name of an image in stores.
pub(super) fn stored_name(protection: &str, number: u64) -> String {
    format!("{protection}-{number:06}")
}

/// The number of an image whose name in a store is that of an image of this protection.
pub(super) fn stored_number(protection: &str, name: &str) -> Option<u64> {
    name.strip_prefix(protection)?.strip_prefix('-')?.parse().ok()
}

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
    pub(super) fn begin(&mut self, protection: &str, record: &Record, verbs: &Arc<Verbs>, number: u64, level: &Level) {
        let protection = protection.to_owned();
        let dir = Images::of(record, verbs).dir(number);
        let old = record.copies.dispensable(number, &level.url, level.keep.unwrap_or(record.wishes.keep));
        let (verbs, url) = (Arc::clone(verbs), level.url.clone());
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

fn upload(verbs: &Verbs, protection: &str, number: u64, dir: &Path, url: String, old: &[(u64, String)]) -> Uploaded {
    let name = |number: u64| stored_name(protection, number);
    let mut done = Uploaded { number, ..Uploaded::default() };
    match verbs.upload(dir, &url, &name(number)) {
        Ok(()) => done.stored = true,
        // A former supervisor has begun it, and has been killed.
        Err(_) if is_there(verbs, dir, &url, &name(number)) => done.stored = true,
        Err(failed) => done.said.push(failed.why),
    }
    if done.stored && !old.is_empty() {
        match verbs.stored(&url) {
            Ok(there) => {
                for (number, checkpoint) in old {
                    let name = name(*number);
                    // It was never there, somebody has removed it, or the name is that of another host's image.
                    let is_own = there.get(&name) == Some(checkpoint);
                    match if is_own { verbs.remove_stored(&url, &name) } else { Ok(()) } {
                        Ok(()) => done.removed.push(*number),
                        Err(failed) => done.said.push(failed.why),
                    }
                }
            }
            Err(failed) => done.said.push(failed.why),
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
    let Some(checkpoint) = checkpoint_in(dir) else { return false };
    verbs.stored(url).is_ok_and(|it| it.get(name) == Some(&checkpoint))
}

/// The name of the checkpoint in a directory, which has an image or an archive.
pub(super) fn checkpoint_in(dir: &Path) -> Option<String> {
    match Archive::at(dir) {
        Some(archive) => Some(Archive::open(&archive).ok()?.checkpoint().to_owned()),
        None => Some(OnDisk::open(dir).ok()?.manifest().id.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_an_image_in_a_store_says_whose_it_is() {
        assert_eq!(stored_number("job", &stored_name("job", 1_234_567)), Some(1_234_567));
        assert_eq!(stored_number("job", &stored_name("job", 3)), Some(3));
        for other in ["job", "job-", "job-x", "job-1-000003", "other-000003", "myjob-000003"] {
            assert_eq!(stored_number("job", other), None, "{other}");
        }
    }
}

//! The images of a protection on the disk.

use std::fs;
use std::path::{Path, PathBuf};

use rekindle_images::{Base, Image as OnDisk, ImageDir};
use rekindle_protect::{Cost, Image, Record, Shelf, Standing};

use super::archive::{archive, hand_hash_on};
use super::folder::{image_dir, image_numbers};
use super::verbs::{Failed, Verbs};

/// Why an image is damaged whose directory is missing.
pub(super) const GONE: &str = "it is not there any more";
/// Where an image is while it comes from a store.
const INCOMING: &str = "incoming";

/// An image that was made.
pub(super) struct Made {
    /// The image that it builds on.
    pub(super) on: Option<u64>,
    pub(super) cost: Option<Cost>,
}

/// What the former supervisor has done without noting it.
pub(super) enum Found {
    /// This image is complete.
    Good(Image),
    /// This image builds on no other any more.
    Independent(u64),
    /// This image is not there any more.
    Gone(u64),
}

/// The images of a protection.
pub(super) struct Images<'a> {
    images: &'a Path,
    shelf: &'a Shelf,
    chain: usize,
    verbs: &'a Verbs,
}

impl<'a> Images<'a> {
    pub(super) fn of(record: &'a Record, verbs: &'a Verbs) -> Self {
        Self { images: &record.wishes.images, shelf: &record.shelf, chain: record.wishes.chain, verbs }
    }

    /// The directory of an image.
    pub(super) fn dir(&self, number: u64) -> PathBuf {
        image_dir(self.images, number)
    }

    /// Makes an image of the job and verifies it. It builds on the newest one, and is made independent of it if the chain is long
    /// by then: nothing builds on it yet. Leaves nothing behind if that fails. The failure says whether the newest image is bad.
    pub(super) fn make(&self, pid: i32, number: u64) -> Result<Made, Failed> {
        let dir = self.dir(number);
        self.remove(number).map_err(|why| Failed { bad_image: false, why })?;
        let on = self.shelf.newest().map(|it| it.number).filter(|_| self.chain > 0);
        let began = std::time::Instant::now();
        let made = || -> Result<Made, Failed> {
            let base = on.map(|it| self.dir(it));
            let mut cost = self.verbs.checkpoint(pid, &dir, base.as_deref())?;
            self.verbs.verify(&dir).map_err(|it| Failed { bad_image: it.bad_image && self.is_bad(on), ..it })?;
            let depth = on.map_or(0, |it| self.shelf.depth(it) + 1);
            let is_long = depth > self.chain;
            if is_long {
                self.verbs.flatten(&dir).map_err(|it| Failed { bad_image: false, ..it })?;
            }
            if let Some(cost) = &mut cost {
                cost.durable = began.elapsed().as_secs_f64();
            }
            Ok(Made { on: on.filter(|_| !is_long), cost })
        };
        made().inspect_err(|_| {
            // What cannot be removed now is removed before the next image of this number.
            let _ = self.remove(number);
        })
    }

    fn is_bad(&self, number: Option<u64>) -> bool {
        number.is_some_and(|it| self.verbs.verify(&self.dir(it)).is_err_and(|it| it.bad_image))
    }

    /// Whether there may be too little room for another archive, which is unpacked to be verified, by the size of the newest one.
    pub(super) fn lacks_room_for_an_archive(&self) -> bool {
        let newest = self.shelf.newest().map(|it| archive(&self.dir(it.number)));
        let size = newest.and_then(|it| fs::metadata(it).ok()).map(|it| it.len());
        let free = ImageDir::open(self.images).and_then(|it| it.free_space());
        matches!((size, free), (Some(size), Ok(free)) if free < size.saturating_mul(2))
    }

    /// Removes an image.
    pub(super) fn remove(&self, number: u64) -> Result<(), String> {
        let dir = self.dir(number);
        match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(format!("cannot remove {}: {error}", dir.display()))
            }
            _ => Ok(()),
        }
    }

    /// Brings an image back from a store, in place of what is here of it. It builds on no other then. An archive is verified before it
    /// is used.
    pub(super) fn fetch(&self, number: u64, url: &str, name: &str) -> Result<(), Failed> {
        let incoming = self.images.join(INCOMING);
        let result =
            receive(self.verbs, &self.dir(number), &incoming, url, name).and_then(|came| self.replace(number, &came));
        // What is left is removed by the next one otherwise.
        let _ = clear(&incoming);
        result
    }

    /// Gives an image that has come from a store its place.
    pub(super) fn replace(&self, number: u64, came: &Path) -> Result<(), Failed> {
        self.remove(number).map_err(|why| Failed { bad_image: false, why })?;
        on_disk("cannot give the image its name", fs::rename(came, self.dir(number)))
    }

    /// Compares the directory with the record: an image that was complete and not noted yet is a good one, if it is; an archive, if it
    /// was verified. What the record does not have otherwise is removed.
    pub(super) fn settle(&self) -> Vec<Found> {
        let mut found = Vec::new();
        let next = self.shelf.next_number();
        let there = |number: &u64| self.dir(*number).exists();
        found.extend(self.shelf.images().iter().map(|it| it.number).filter(|it| !there(it)).map(Found::Gone));
        for number in image_numbers(self.images) {
            let dir = self.dir(number);
            let known = self.shelf.get(number);
            if known.is_some_and(|it| it.on.is_some()) && OnDisk::open(&dir).is_ok_and(|it| it.depth() == 0) {
                found.push(Found::Independent(number));
            }
            if known.is_some() {
                continue;
            }
            let verified = if number >= next { self.verbs.verify_unknown(&dir).map_err(Some) } else { Err(None) };
            match verified {
                Ok(()) => found.push(Found::Good(self.adopted(&dir, number))),
                // It may be good. It stays until the next image takes its number, or until the next supervisor looks.
                Err(Some(Failed { bad_image: false, why })) if archive(&dir).exists() => {
                    eprintln!("rekindle: image {number} was not verified: {why}");
                }
                Err(_) => {
                    if let Err(error) = self.remove(number) {
                        eprintln!("rekindle: {error}");
                    }
                }
            }
        }
        found
    }

    fn adopted(&self, dir: &Path, number: u64) -> Image {
        let depth = OnDisk::open(dir).map_or(0, |it| it.depth());
        // The former supervisor did not come to it.
        let is_flattened = depth > self.chain && self.verbs.flatten(dir).is_ok();
        let is_independent = depth == 0 || is_flattened;
        let link = fs::read_link(dir.join(Base::LINK)).ok();
        let base = link.and_then(|it| image_number(&it)).filter(|_| !is_independent);
        let modified = fs::metadata(dir).and_then(|it| it.modified()).ok();
        let since = modified.and_then(|it| it.duration_since(std::time::UNIX_EPOCH).ok()).unwrap_or_default();
        let began_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        Image { number, on: base, standing: Standing::Good, began_ms, cost: None, verified_ms: 0 }
    }
}

/// Copies an image from a store into a directory, in which it is independent of others, and returns where it is. It is a copy of what
/// was in `damaged`.
pub(super) fn receive(
    verbs: &Verbs,
    damaged: &Path,
    incoming: &Path,
    url: &str,
    name: &str,
) -> Result<PathBuf, Failed> {
    clear(incoming)?;
    // The directory may be gone with its images.
    if let Some(parent) = incoming.parent() {
        on_disk("cannot make the directory of the images", fs::create_dir_all(parent))?;
    }
    let came = verbs.fetch(url, name, incoming)?;
    if archive(&came).exists() {
        hand_hash_on(damaged, &came)?;
    } else if came != incoming {
        verbs.flatten(&came)?;
    }
    Ok(came)
}

/// Removes what has come before.
pub(super) fn clear(incoming: &Path) -> Result<(), Failed> {
    on_disk("cannot remove what came before", fs::remove_dir_all(incoming))
}

fn on_disk(what: &str, result: std::io::Result<()>) -> Result<(), Failed> {
    match result {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Failed { bad_image: false, why: format!("{what}: {error}") })
        }
        _ => Ok(()),
    }
}

/// The number in the name of an image's directory.
fn image_number(dir: &Path) -> Option<u64> {
    dir.file_name()?.to_str()?.rsplit_once('-')?.1.parse().ok()
}

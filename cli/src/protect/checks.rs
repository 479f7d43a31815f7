//! What is done beside the job about the images that are kept: each is verified again from time to time, and a damaged one comes back
//! from a store. A thread does one thing at a time.
//!
//! ```text
//!   images/mended/image/      what has come, until it was verified
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rekindle_protect::Record;
use rekindle_protect::again::{self, Findings};
use rekindle_protect::levels::{self, Copy};

use super::images::{GONE, Images, clear, receive};
use super::uploads::stored_name;
use super::verbs::{Failed, Verbs};

/// Where an image is that comes from a store while the job runs. Its verification unpacks beside it, not beside the images.
const MENDED: &str = "mended/image";
const MENDED_ABOVE: &str = "mended";
/// How long to wait at least after a verification that has failed for a reason of its own, a full disk for example.
const AFTER_FAILURE: Duration = Duration::from_secs(60);

/// What was done.
pub(super) enum Checked {
    /// An image was verified.
    Verified { number: u64, result: Result<(), Failed> },
    /// An image has come from a store, to this directory, and was verified; or not.
    Received { copy: Copy, result: Result<PathBuf, Failed> },
}

/// What is being done.
struct Running {
    number: u64,
    /// The copy, if one comes from a store.
    copy: Option<Copy>,
    /// Whether the image has been replaced since then.
    is_void: bool,
    thread: JoinHandle<(Checked, Duration)>,
}

/// Verifications of images that are kept, and returns of damaged ones.
pub(super) struct Checks {
    running: Option<Running>,
    /// When another image may be verified that is not suspect.
    not_before: Instant,
    findings: Findings,
    /// The copies that did not come back, and when they were asked for.
    in_vain: BTreeMap<Copy, Instant>,
}

impl Checks {
    pub(super) fn new() -> Self {
        Self { running: None, not_before: Instant::now(), findings: Findings::default(), in_vain: BTreeMap::new() }
    }

    /// Begins what is due, if nothing is being done.
    pub(super) fn begin(&mut self, protection: &str, record: &Record, verbs: &Arc<Verbs>, now_ms: u64) {
        if self.running.is_some() {
            return;
        }
        let every = Duration::try_from_secs_f64(record.wishes.verify_every).unwrap_or(Duration::MAX);
        // A store that could not be reached may be there again.
        self.in_vain.retain(|_, since| since.elapsed() < every.max(AFTER_FAILURE));
        let in_vain = self.in_vain.keys().cloned().collect();
        let copy = levels::to_mend(&record.wishes.levels, &record.copies, &record.shelf, record.wishes.keep, &in_vain);
        let is_pause = Instant::now() < self.not_before;
        let due = || again::due(&record.shelf, every, now_ms, &self.findings, is_pause);
        let number = copy.as_ref().map(|it| it.number).or_else(due);
        let Some(number) = number else { return };
        let images = Images::of(record, verbs);
        let dir = images.dir(number);
        let others = record.shelf.good().map(|it| it.number).filter(|it| *it != number);
        let others = others.map(|it| images.dir(it)).collect::<Vec<_>>();
        let (verbs, mended) = (Arc::clone(verbs), mended(record));
        let (name, comes) = (stored_name(protection, number), copy.clone());
        let thread = std::thread::spawn(move || {
            let began = Instant::now();
            let done = match copy {
                None => Checked::Verified { number, result: verify(&verbs, &dir, &others) },
                Some(copy) => {
                    let came = receive(&verbs, &dir, &mended, &copy.url, &name);
                    let result = came.and_then(|came| verbs.verify(&came).map(|()| came));
                    Checked::Received { copy, result }
                }
            };
            (done, began.elapsed())
        });
        self.running = Some(Running { number, copy: comes, is_void: false, thread });
    }

    /// What was done, if it is over and still means something.
    pub(super) fn ended(&mut self) -> Option<Checked> {
        self.running.as_ref().filter(|it| it.thread.is_finished())?;
        self.join()
    }

    /// Whether this copy is coming from its store.
    pub(super) fn is_receiving(&self, copy: &Copy) -> bool {
        self.running.as_ref().is_some_and(|it| it.copy.as_ref() == Some(copy))
    }

    /// Waits for an image that is coming from a store. A verification may go on alone.
    pub(super) fn wait_received(&mut self) -> Option<Checked> {
        self.running.as_ref().filter(|it| it.copy.is_some())?;
        self.join()
    }

    fn join(&mut self) -> Option<Checked> {
        let running = self.running.take()?;
        let (done, took) = running.thread.join().ok()?;
        match &done {
            Checked::Verified { number, result } => {
                let has_failed = result.as_ref().is_err_and(|it| !it.bad_image);
                if has_failed {
                    self.findings.unread.insert(*number);
                } else {
                    self.findings.unread.remove(number);
                    self.findings.suspects.remove(number);
                }
                let pause = again::pause(took).max(if has_failed { AFTER_FAILURE } else { Duration::ZERO });
                self.not_before = Instant::now() + pause;
            }
            Checked::Received { copy, result: Err(_) } => {
                self.in_vain.insert(copy.clone(), Instant::now());
            }
            Checked::Received { .. } => {}
        }
        Some(done).filter(|_| !running.is_void)
    }

    /// The image was replaced: what is found out about the former one counts no more.
    pub(super) fn was_replaced(&mut self, number: u64) {
        if let Some(running) = self.running.as_mut().filter(|it| it.number == number && it.copy.is_none()) {
            running.is_void = true;
        }
    }

    /// These images build on one that is damaged: they are verified first, and at once.
    pub(super) fn suspect(&mut self, numbers: impl Iterator<Item = u64>) {
        self.findings.suspects.extend(numbers);
    }
}

fn mended(record: &Record) -> PathBuf {
    record.wishes.images.join(MENDED)
}

/// Removes what has come from a store.
pub(super) fn clear_mended(record: &Record) -> Result<(), Failed> {
    clear(&record.wishes.images.join(MENDED_ABOVE))
}

/// Verifies an image. It is damaged only if it is so twice: nothing needs it now, and a disk or a server may have been away for a moment. It
/// is gone only if others are there: otherwise the file system may be gone.
fn verify(verbs: &Verbs, dir: &Path, others: &[PathBuf]) -> Result<(), Failed> {
    let is_there = |dir: &Path| dir.try_exists().map_err(|error| Failed { bad_image: false, why: error.to_string() });
    if !is_there(dir)? {
        let bad_image = others.iter().any(|it| is_there(it).is_ok_and(|it| it));
        return Err(Failed { bad_image, why: GONE.to_owned() });
    }
    match verbs.verify_again(dir) {
        Err(Failed { bad_image: true, .. }) => verbs.verify_again(dir),
        verified => verified,
    }
}

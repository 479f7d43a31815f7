//! The warm images, and the workers that wait for restores of each.
//!
//! ```text
//!   reserve ─► content is copied ─► WarmImage ─┬─► sets of workers are made (`keep.rs`): waiting ─► taken, for one restore
//!      │                                       │        ▲                                  │ a worker has died
//!      └─ the images that were used             │        └──────── again, when the restore ◄┘
//!         longest ago are forgotten             │                  has loaded everything
//!                                               └─► forgotten: content and workers go
//! ```

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rekindle_images::{Checksum, Image, Manifest};
use rekindle_wire::control::{Learned, Resident, WarmInfo};
use tracing::{info, warn};

use super::super::super::grants::Uuid;
use super::super::super::worker::{Pieces, Worker};
use super::super::super::{lock, wait_timeout};
use super::super::check;
use super::content::Content;
use super::error::WarmError;
use super::lessons::Lessons;

/// How long after a failure another set of workers is tried, unless something changes before.
const RETRY: Duration = Duration::from_secs(10);

/// How often an image's thread looks for work of which nobody has told it.
const IDLE: Duration = Duration::from_secs(3600);

/// What an image that is kept warm is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon) struct Wanted {
    /// The number of restores for which workers wait.
    pub(in crate::daemon) copies: usize,
    /// How the content of GPU memory is on the GPU, if it is.
    pub(in crate::daemon) resident: Option<Resident>,
}

/// The images that are kept warm, in the order in which they were used, the last one last.
pub(in crate::daemon) struct WarmImages {
    /// The bytes of host memory that all may have together.
    budget: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    images: VecDeque<Arc<WarmImage>>,
    /// Bytes of images that are being copied.
    reserved: u64,
}

/// Host memory for an image that is being copied.
pub(super) struct Reserved<'a> {
    images: &'a WarmImages,
    bytes: u64,
    /// Whether other images have made room. Their memory is free when the last worker has closed their files.
    pub(super) evicted: bool,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        lock(&self.images.state).reserved -= self.bytes;
    }
}

impl WarmImages {
    pub(in crate::daemon) fn new(budget: u64) -> Self {
        Self { budget, state: Mutex::default() }
    }

    /// Sets host memory aside for an image. Forgets the images that were used longest ago, if the budget needs that.
    pub(super) fn reserve(&self, bytes: u64) -> Result<Reserved<'_>, WarmError> {
        let mut forgotten = Vec::new();
        let mut state = lock(&self.state);
        if bytes.saturating_add(state.reserved) > self.budget {
            return Err(WarmError::OverBudget { needed: bytes, budget: self.budget });
        }
        let taken = |state: &State| state.images.iter().map(|it| it.bytes).sum::<u64>() + state.reserved;
        while taken(&state).saturating_add(bytes) > self.budget {
            let Some(oldest) = state.images.pop_front() else { break };
            forgotten.push(oldest);
        }
        state.reserved += bytes;
        drop(state);
        let evicted = !forgotten.is_empty();
        for image in forgotten {
            info!(image = %image.name(), "no longer warm: another image needs the host memory");
            image.forget();
        }
        Ok(Reserved { images: self, bytes, evicted })
    }

    /// Adds an image whose content is in place of what was reserved. If another request has added it meanwhile, that one stays.
    pub(super) fn add(&self, reserved: Reserved<'_>, image: Arc<WarmImage>) -> Arc<WarmImage> {
        drop(reserved);
        let mut state = lock(&self.state);
        if let Some(known) = state.images.iter().find(|it| it.hash == image.hash) {
            return Arc::clone(known);
        }
        state.images.push_back(Arc::clone(&image));
        image
    }

    /// The image that a directory has, if it is warm. It is used now.
    pub(in crate::daemon) fn find(&self, image: &Image) -> Option<Arc<WarmImage>> {
        let mut state = lock(&self.state);
        let place = state.images.iter().position(|it| it.hash == image.manifest_hash())?;
        let found = state.images.remove(place)?;
        state.images.push_back(Arc::clone(&found));
        Some(found)
    }

    /// Forgets an image. Returns whether it was warm.
    pub(super) fn forget(&self, hash: Checksum) -> bool {
        let mut state = lock(&self.state);
        let found = state.images.iter().position(|it| it.hash == hash).and_then(|place| state.images.remove(place));
        drop(state);
        found.inspect(|image| image.forget()).is_some()
    }

    /// Forgets the images with this id, or from this directory. Returns whether there were any.
    pub(super) fn forget_named(&self, name: &str) -> bool {
        let is_named = |image: &Arc<WarmImage>| image.name() == name || image.directory == name;
        let mut state = lock(&self.state);
        let (forgotten, others): (VecDeque<_>, _) = std::mem::take(&mut state.images).into_iter().partition(is_named);
        state.images = others;
        drop(state);
        forgotten.iter().for_each(|image| image.forget());
        !forgotten.is_empty()
    }

    /// For listings, the image that was used last first.
    pub(in crate::daemon) fn infos(&self) -> Vec<WarmInfo> {
        let all: Vec<_> = lock(&self.state).images.iter().rev().cloned().collect();
        all.iter().map(|it| it.info()).collect()
    }
}

/// An image whose content is in host memory.
pub(in crate::daemon) struct WarmImage {
    hash: Checksum,
    /// The directory that it was read from.
    directory: String,
    pub(super) manifest: Manifest,
    content: Content,
    bytes: u64,
    lessons: Lessons,
    kept: Mutex<Kept>,
    changed: Condvar,
}

struct Kept {
    wanted: Wanted,
    waiting: Vec<Set>,
    template: Option<Arc<Template>>,
    /// Restores of this image that are loading. New workers would take the driver's locks and the link from them.
    loading: usize,
    restores: u64,
    used: Instant,
    problem: Option<Problem>,
    forgotten: bool,
}

struct Problem {
    what: String,
    at: Instant,
    /// Whether another attempt can only fail alike.
    lasting: bool,
}

/// A worker for each client of an image, in their order, which has loaded all of the client but the content of GPU memory, or
/// that too.
pub(super) struct Set {
    pub(super) workers: Vec<Arc<Worker>>,
    /// The GPUs that were chosen for each client; none where a worker sees all.
    pub(super) gpus: Vec<Option<Vec<Uuid>>>,
    pub(super) resident: Option<Resident>,
    /// Whether the workers borrow memory from the template.
    pub(super) borrows: bool,
}

/// The content of GPU memory on the GPU, for each client: pieces whose descriptors keep the memory.
pub(super) struct Template {
    pub(super) clients: Vec<Pieces>,
    /// The GPUs that have the content, as in [`Set`].
    pub(super) gpus: Vec<Option<Vec<Uuid>>>,
}

impl Set {
    fn is_whole(&self) -> bool {
        self.workers.iter().all(|it| !it.is_dead())
    }

    pub(super) fn end(&self) {
        self.workers.iter().for_each(|it| it.kill());
    }
}

/// Whether the content of GPU memory is on the GPU once.
fn has_template(resident: Option<Resident>) -> bool {
    matches!(resident, Some(Resident::Once | Resident::Shared))
}

/// A set of workers that a restore has taken.
pub(in crate::daemon) struct Taken {
    pub(in crate::daemon) workers: Vec<Arc<Worker>>,
    /// Whether the workers have the content of GPU memory.
    pub(in crate::daemon) loaded: bool,
    /// For workers that borrow memory: what clients of the image have taught, by their places.
    pub(in crate::daemon) learned: Option<Vec<Learned>>,
}

/// A restore from a warm image, until it has loaded everything.
pub(in crate::daemon) struct Loading(Arc<WarmImage>);

impl Drop for Loading {
    fn drop(&mut self) {
        let mut kept = lock(&self.0.kept);
        kept.loading -= 1;
        // What has failed before may succeed now.
        if let Some(problem) = &kept.problem
            && !problem.lasting
        {
            kept.problem = None;
        }
        self.0.changed.notify_all();
    }
}

impl Loading {
    /// The files of the image.
    pub(in crate::daemon) fn content(&self) -> &Content {
        &self.0.content
    }

    /// Takes workers that wait for a restore with these GPUs.
    pub(in crate::daemon) fn take(&self, gpus: &[Option<Vec<Uuid>>]) -> Option<Taken> {
        let mut kept = lock(&self.0.kept);
        let place = kept.waiting.iter().position(|it| it.gpus == gpus && it.is_whole())?;
        let Set { workers, resident, borrows, .. } = kept.waiting.remove(place);
        let learned = borrows.then(|| (0..workers.len()).map(|place| self.0.lessons.of(place)).collect());
        Some(Taken { workers, loaded: resident == Some(Resident::Each), learned })
    }
}

/// What is to be done for an image.
pub(super) enum Task {
    /// Load the content of GPU memory once, for workers to copy it.
    MakeTemplate,
    /// Prepare workers, which copy content from the template, if there is one.
    Make {
        resident: Option<Resident>,
        template: Option<Arc<Template>>,
    },
    /// Write what clients have taught.
    Write,
    End,
}

impl WarmImage {
    pub(super) fn new(image: &Image, content: Content, bytes: u64, wanted: Wanted, state_dir: &Path) -> Self {
        let kept = Kept {
            wanted,
            waiting: Vec::new(),
            template: None,
            loading: 0,
            restores: 0,
            used: Instant::now(),
            problem: None,
            forgotten: false,
        };
        Self {
            hash: image.manifest_hash(),
            directory: image.dir().path().display().to_string(),
            manifest: image.manifest().clone(),
            content,
            bytes,
            lessons: Lessons::open(state_dir, image.manifest_hash(), check::attached(image.manifest()).count()),
            kept: Mutex::new(kept),
            changed: Condvar::new(),
        }
    }

    pub(super) fn name(&self) -> String {
        self.manifest.id.to_string()
    }

    pub(super) fn content(&self) -> &Content {
        &self.content
    }

    /// A restore of it begins.
    pub(in crate::daemon) fn begin(self: &Arc<Self>) -> Loading {
        let mut kept = lock(&self.kept);
        kept.loading += 1;
        kept.restores += 1;
        kept.used = Instant::now();
        Loading(Arc::clone(self))
    }

    /// Changes what the image is to have. Workers that it is not to have end.
    pub(super) fn wants(&self, wanted: Wanted) {
        let mut kept = lock(&self.kept);
        kept.wanted = wanted;
        kept.used = Instant::now();
        kept.problem = None;
        if !has_template(wanted.resident) {
            kept.template = None;
        }
        let mut surplus: Vec<_> = kept.waiting.extract_if(.., |it| it.resident != wanted.resident).collect();
        let enough = wanted.copies.min(kept.waiting.len());
        surplus.extend(kept.waiting.drain(enough..));
        drop(kept);
        self.changed.notify_all();
        surplus.iter().for_each(Set::end);
    }

    /// Waits until a set of workers is to be made, or nothing any more.
    pub(super) fn task(&self) -> Task {
        let mut kept = lock(&self.kept);
        loop {
            if kept.forgotten {
                return Task::End;
            }
            let dead: Vec<_> = kept.waiting.extract_if(.., |it| !it.is_whole()).collect();
            // The other workers of its tree are of no use.
            dead.iter().for_each(Set::end);
            let delay = kept.problem.as_ref().map_or(Duration::ZERO, |it| match it.lasting {
                true => Duration::MAX,
                false => RETRY.saturating_sub(it.at.elapsed()),
            });
            let is_wanted = kept.loading == 0 && kept.waiting.len() < kept.wanted.copies;
            if is_wanted && delay.is_zero() {
                let (resident, template) = (kept.wanted.resident, kept.template.clone());
                return match (resident, &template) {
                    (resident, None) if has_template(resident) => Task::MakeTemplate,
                    _ => Task::Make { resident, template },
                };
            }
            let due = self.lessons.due_in();
            if due == Some(Duration::ZERO) {
                return Task::Write;
            }
            let time = if is_wanted { delay.min(IDLE) } else { IDLE };
            let time = due.map_or(time, |due| time.min(due));
            kept = wait_timeout(&self.changed, kept, time);
        }
    }

    /// A set was made. It ends at once if it is not wanted any more.
    pub(super) fn made(&self, set: Set) {
        let mut kept = lock(&self.kept);
        let Wanted { copies, resident } = kept.wanted;
        let is_wanted = !kept.forgotten && kept.waiting.len() < copies && set.resident == resident;
        kept.problem = None;
        let refused = if is_wanted {
            kept.waiting.push(set);
            None
        } else {
            Some(set)
        };
        drop(kept);
        self.changed.notify_all();
        refused.inspect(Set::end);
    }

    /// The template was made. It goes at once if it is not wanted any more.
    pub(super) fn made_template(&self, template: Template) {
        let mut kept = lock(&self.kept);
        if !kept.forgotten && has_template(kept.wanted.resident) {
            kept.template = Some(Arc::new(template));
        }
    }

    /// A set could not be made, for this reason.
    pub(super) fn failed(&self, what: String, lasting: bool) {
        let mut kept = lock(&self.kept);
        if kept.problem.as_ref().is_none_or(|it| it.what != what) {
            warn!(image = %self.name(), "no worker waits for restores of a warm image: {what}");
        }
        kept.problem = Some(Problem { what, at: Instant::now(), lasting });
        drop(kept);
        self.changed.notify_all();
    }

    /// What the client at a place, and its former selves, have taught.
    pub(super) fn lessons(&self, place: usize) -> Learned {
        self.lessons.of(place)
    }

    /// A client has taught more. `is_last`: it is about to end.
    pub(super) fn learn(&self, place: usize, learned: &Learned, is_last: bool) {
        self.lessons.add(place, learned, is_last);
        // The thread that is to write may be about to wait.
        drop(lock(&self.kept));
        self.changed.notify_all();
    }

    /// Writes what clients have taught.
    pub(super) fn write_lessons(&self) {
        self.lessons.write();
    }

    /// Something may have changed, such as the death of a worker.
    pub(super) fn look_again(&self) {
        self.changed.notify_all();
    }

    /// Waits until all workers that the image is to have wait for restores, or until it is clear why they do not. `goes_on` says
    /// whether to go on waiting, again and again.
    pub(super) fn wait_until_ready(&self, goes_on: impl Fn() -> bool) {
        const LOOK: Duration = Duration::from_millis(200);
        let is_settled = |kept: &MutexGuard<'_, Kept>| {
            kept.forgotten || kept.problem.is_some() || kept.waiting.len() >= kept.wanted.copies
        };
        let mut kept = lock(&self.kept);
        while !is_settled(&kept) && goes_on() {
            kept = wait_timeout(&self.changed, kept, LOOK);
        }
    }

    fn forget(&self) {
        let mut kept = lock(&self.kept);
        kept.forgotten = true;
        let waiting = std::mem::take(&mut kept.waiting);
        kept.template = None;
        drop(kept);
        self.changed.notify_all();
        waiting.iter().for_each(Set::end);
    }

    pub(super) fn info(&self) -> WarmInfo {
        let kept = lock(&self.kept);
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        WarmInfo {
            image: self.name(),
            directory: self.directory.clone(),
            bytes: self.bytes,
            resident: kept.wanted.resident,
            copies: count(kept.wanted.copies),
            ready: count(kept.waiting.iter().filter(|it| it.is_whole()).count()),
            restores: kept.restores,
            idle_ms: u64::try_from(kept.used.elapsed().as_millis()).unwrap_or(u64::MAX),
            problem: kept.problem.as_ref().map(|it| it.what.clone()),
        }
    }
}

//! The supervisor of a protection: checkpoints the job when that is due, and restores it when it has failed.
//!
//! ```text
//!            ┌────────────────────────────── the interval has passed ──► checkpoint ─► verify ─► flatten a long chain
//!   watching ┤                                                             ─► note the image ─► remove old ones ─► upload
//!            ├── an image was verified long ago ─► verify it again ──damaged──► fetch it from a store
//!            └── the job has failed ─► kill what is left of it ─► restore the newest good image ──┬── watching
//!                                            ▲   damaged: fetch it from a store; if none has it,  │
//!                                            │            take the one before ─────────────────────┘
//!                                            └── failed: later, and not for ever
//! ```
//!
//! `rekindle_protect` decides, and `shelf` handles the images. After each step the record is replaced, so a supervisor that is killed
//! at any moment loses at most what it was about to note; the next one finds that out (`Images::settle`). The job does not notice.
//!
//! If its guard is gone, a supervisor becomes the guard, which starts another supervisor.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rekindle_protect::container::{Found as FoundContainer, Said};
use rekindle_protect::levels::{self, Copy};
use rekindle_protect::record::Every;
use rekindle_protect::{Choice, Cost, Ending, Event, Image, Phase, Process, Record, Standing, interval, phase};
use rekindle_wire::control::{Reply, Request};
use rustix::process::getppid;

use super::checks::{self, Checked, Checks};
use super::container::Asked;
use super::ended;
use super::folder::{Folder, append};
use super::guard::{GUARD, own};
use super::images::{Found, GONE, Images};
use super::job::{self, Clients, Job, Since};
use super::uploads::{self, Uploaded, Uploads};
use super::verbs::{Failed, Verbs};
use crate::failure::Failure;
use crate::process::boot;
use crate::{cpu_image, daemon};

/// How often to look for what nobody reports: the user's wishes, the guard.
const LOOK: Duration = Duration::from_millis(250);
/// How often to look whether there is a daemon again that can restore.
const DAEMON: Duration = Duration::from_secs(1);
/// How often to ask podman what a user has done while the supervisor waits for its next attempt.
const USER: Duration = Duration::from_secs(1);
/// What has happened if a verb went on after its supervisor was killed, or if podman did not answer after a restore.
const RESTORED_BEFORE: &str = "the job was restored, which is found out only now";
/// How often an image may fail to restore before an older one is tried.
const TRIES: u32 = 3;
/// The interval as long as nobody knows what a checkpoint costs.
const FIRST: Duration = Duration::from_secs(60);

/// Supervises until the protection has come to its end.
pub(super) fn supervise(path: &Path) -> Result<(), Failure> {
    let folder = Folder::at(path);
    let guard = getppid();
    let lock = folder.lock()?;
    let record = folder.record()?;
    let mut supervisor = Supervisor {
        guard: guard.map_or(0, |it| it.as_raw_nonzero().get()),
        uploads: Uploads::default(),
        failed_uploads: BTreeSet::new(),
        checks: Checks::new(),
        job: None,
        container: record.wishes.container.as_ref().map(Asked::new),
        not_before: Instant::now(),
        failed_image: (0, 0),
        passed_over: BTreeMap::new(),
        looked_for_user: Instant::now(),
        fetched: BTreeSet::new(),
        unwritten: false,
        verbs: Arc::new(Verbs::new(&record.wishes, lock)),
        record,
        folder,
    };
    supervisor.begin();
    while !supervisor.record.phase.is_final() {
        if getppid() != guard {
            let error = own(GUARD, path)?.exec();
            return Err(anyhow::Error::from(error).context("cannot become the guard, which is gone").into());
        }
        supervisor.step();
    }
    supervisor.finish();
    Ok(())
}

/// The interval between checkpoints that a record leads to.
pub(super) fn choice(record: &Record) -> Choice {
    let mtbf = record.failures.mean_time(Duration::from_secs_f64(record.wishes.mtbf), record.gpus);
    let cost = cost(record);
    match (record.wishes.every, cost) {
        (Every::Seconds(seconds), cost) => {
            let every = Duration::try_from_secs_f64(seconds).unwrap_or(interval::LONGEST);
            interval::fixed(every, cost, mtbf, record.restore_seconds)
        }
        (Every::Auto, Some(cost)) => interval::choose(cost, mtbf, record.restore_seconds),
        (Every::Auto, None) => interval::fixed(FIRST, None, mtbf, record.restore_seconds),
    }
}

/// What a checkpoint of the job costs: the mean of those whose images are there.
pub(super) fn cost(record: &Record) -> Option<Cost> {
    Cost::mean(record.shelf.good().filter_map(|it| it.cost))
}

struct Supervisor {
    folder: Folder,
    guard: i32,
    record: Record,
    verbs: Arc<Verbs>,
    job: Option<Job>,
    /// The container, if one is protected.
    container: Option<Asked>,
    /// When the next attempt may be made after one that has failed.
    not_before: Instant,
    /// The image that was tried last, and how often its restore has failed.
    failed_image: (u64, u32),
    /// The archives that have failed to restore so often that older ones are tried, and why. They are set aside if an older one does.
    passed_over: BTreeMap<u64, String>,
    /// When podman was asked last, while the supervisor waits, what a user has done.
    looked_for_user: Instant,
    /// The copies that were asked of stores since the job has failed.
    fetched: BTreeSet<Copy>,
    uploads: Uploads,
    /// The uploads of the newest image that have failed.
    failed_uploads: BTreeSet<Copy>,
    checks: Checks,
    /// Whether the record on the disk is older than this one.
    unwritten: bool,
}

impl Supervisor {
    /// Goes on where the former supervisor was.
    fn begin(&mut self) {
        // What a former supervisor has not brought to its end.
        let _ = checks::clear_mended(&self.record);
        for found in Images::of(&self.record, &self.verbs).settle() {
            match found {
                Found::Good(image) => {
                    self.note(format!("image {} was complete when the former supervisor ended", image.number));
                    self.record.shelf.add(image);
                }
                Found::Independent(number) => self.record.shelf.flattened(number),
                Found::Gone(number) => self.damaged(number, GONE),
            }
        }
        if self.record.job.is_some() && self.record.boot != boot() {
            self.note("the machine was started again".to_owned());
            self.record.boot = boot();
            self.record.tree.clear();
            // Whatever has its number now is another process.
            if let Some(job) = &mut self.record.job {
                *job = Process::of_former_boot(job.pid);
            }
            self.folder.forget_end();
        }
        self.save();
    }

    fn step(&mut self) {
        if self.unwritten {
            self.save();
        }
        if self.folder.stop_is_wished() {
            return self.happens(Event::Stop, "the user stops the protection".to_owned());
        }
        match &self.record.phase {
            Phase::Restoring { .. } => self.restore(),
            _ => self.watch(),
        }
    }

    /// Watches the job until something happens, for a while.
    fn watch(&mut self) {
        if self.record.job.is_none() {
            self.record.job = self.folder.job();
            if self.record.job.is_none() {
                std::thread::sleep(LOOK / 10);
                return;
            }
            self.save();
        }
        let Some(process) = self.record.job else { return };
        if self.job.as_ref().is_none_or(|it| it.process() != process) {
            let mut job = Job::watch(process, self.record.wishes.container.as_ref(), self.record.restores > 0);
            // The sooner the workers are known, the surer is how the job ends.
            if let Some(clients) = job.look(&self.record.wishes.socket, &job::tree(process.pid)) {
                self.record.gpus = clients.gpus.max(1);
            }
            self.job = Some(job);
        }
        let wait = self.until_due().min(LOOK);
        let began = Instant::now();
        let socket = self.record.wishes.socket.clone();
        let Some(job) = &mut self.job else { return };
        let ending = job.wait(&self.folder, &socket, wait);
        self.record.failures.watched += began.elapsed().as_secs_f64();
        if let Some(ending) = ending {
            return self.ended(ending);
        }
        let tree = job::tree(process.pid);
        if job.is_to_look()
            && let Some(clients) = job.look(&socket, &tree)
        {
            self.record.gpus = clients.gpus.max(1);
        }
        // Of a tree whose root has just ended, the record keeps what the last look has found: its children may live.
        if !tree.is_empty() {
            self.record.tree = tree;
        }
        if let Some(done) = self.uploads.ended() {
            self.uploaded(done);
            self.tidy();
        }
        if let Some(done) = self.checks.ended() {
            self.checked(done);
        }
        self.checks.begin(&self.folder.name(), &self.record, &self.verbs, now_ms());
        if self.until_due().is_zero() {
            self.checkpoint(process);
        }
    }

    /// How long until the next checkpoint is due.
    fn until_due(&self) -> Duration {
        let backed_off = self.not_before.saturating_duration_since(Instant::now());
        let Some(newest) = self.record.shelf.newest() else { return backed_off };
        let since = Duration::from_millis(now_ms().saturating_sub(newest.began_ms));
        choice(&self.record).interval().saturating_sub(since).max(backed_off)
    }

    fn ended(&mut self, ending: Ending) {
        let rules = self.record.wishes.rules;
        if rules.is_failure(ending) {
            self.record.failures.seen += 1;
        }
        let was_seen = self.job.take().is_some_and(|it| it.was_seen());
        self.happens(Event::Ended(ending), format!("the job has ended: {ending}"));
        if was_seen && matches!(self.record.phase, Phase::Restoring { .. }) {
            // What does not end now, the restore finds.
            let _ = job::kill(&self.record.tree, self.guard, Since::Now);
        }
    }

    /// Makes the next image.
    fn checkpoint(&mut self, process: Process) {
        let Some(clients) = self.job.as_mut().and_then(|job| job.look(&self.record.wishes.socket, &self.record.tree))
        else {
            // It has not used a GPU yet, or the daemon does not run: there is nothing to save, or nobody to save it.
            self.not_before = Instant::now() + LOOK;
            return;
        };
        self.record.gpus = clients.gpus.max(1);
        let number = self.record.shelf.next_number();
        let began_ms = now_ms();
        let made = Images::of(&self.record, &self.verbs).make(process.pid, number);
        match made {
            Ok(made) => {
                let (on, cost, standing) = (made.on, made.cost, Standing::Good);
                let image = Image { number, on, standing, began_ms, cost, verified_ms: 0 };
                self.record.shelf.add(image);
                self.record.failed_checkpoints = 0;
                self.not_before = Instant::now();
                self.happens(Event::Imaged, format!("image {number} is complete"));
                self.tidy();
                if let Some(names) = self.container.as_mut().and_then(Asked::newly_needed_by) {
                    self.note(format!(
                        "{names} need the container, so podman will not let it be removed for a restore"
                    ));
                    self.save();
                }
            }
            Err(Failed { bad_image, why }) => {
                self.record.failed_checkpoints = self.record.failed_checkpoints.saturating_add(1);
                // The next one builds on no image that may be bad.
                if let Some(base) = self.record.shelf.newest().map(|it| it.number).filter(|_| bad_image) {
                    self.damaged(base, &why);
                }
                self.not_before = Instant::now() + phase::pause(self.record.failed_checkpoints);
                self.note(format!("image {number} was not made: {why}"));
                self.make_room();
                self.save();
            }
        }
    }

    /// Gives up the oldest archive if there is no room for another one, and it is not the last.
    fn make_room(&mut self) {
        let oldest = self.record.shelf.good().last().map(|it| it.number);
        let is_last = self.record.shelf.good().nth(1).is_none();
        let Some(oldest) = oldest.filter(|_| self.container.is_some() && !is_last) else { return };
        if Images::of(&self.record, &self.verbs).lacks_room_for_an_archive() {
            self.record.shelf.removed(oldest);
            self.note(format!("image {oldest} is removed before its time: there is no room for another one"));
            // On a full disk the record may have an image that is gone: the next supervisor notices.
            self.save();
            if let Err(why) = Images::of(&self.record, &self.verbs).remove(oldest) {
                self.note(why);
            }
        }
    }

    /// Removes what is not to be kept, and begins to upload what a store does not have.
    fn tidy(&mut self) {
        // An image that builds on others is uploaded with them, so all stay meanwhile.
        if self.uploads.is_running() {
            return;
        }
        let goes = self.record.shelf.dispensable(self.record.wishes.keep);
        goes.iter().for_each(|it| self.record.shelf.removed(*it));
        if !goes.is_empty() {
            // If this supervisor is killed in between, the next one removes what the record does not have. On a full disk the record
            // may have images that are gone: that one notices too.
            self.save();
            let images = Images::of(&self.record, &self.verbs);
            let said: Vec<String> = goes.iter().filter_map(|it| images.remove(*it).err()).collect();
            said.into_iter().for_each(|it| self.note(it));
        }
        let Record { wishes, copies, shelf, .. } = &self.record;
        if let Some((number, level)) = levels::due(&wishes.levels, copies, shelf, &self.failed_uploads) {
            let (level, began_ms) = (level.clone(), shelf.get(number).map_or(0, |it| it.began_ms));
            let dir = Images::of(&self.record, &self.verbs).dir(number);
            // One that cannot be read is found out by the upload.
            let checkpoint = uploads::checkpoint_in(&dir).unwrap_or_default();
            self.record.copies.begin(number, began_ms, &checkpoint, &level.url);
            if self.save() {
                self.uploads.begin(&self.folder.name(), &self.record, &self.verbs, number, &level);
            }
        }
    }

    fn uploaded(&mut self, done: Uploaded) {
        let Uploaded { number, url, stored, removed, said } = done;
        if stored {
            self.record.copies.whole(number, &url);
            self.note(format!("{url} has image {number}"));
        } else {
            self.failed_uploads.retain(|it| it.number == number);
            self.failed_uploads.insert(Copy { number, url: url.clone() });
        }
        removed.iter().for_each(|it| self.record.copies.removed(*it, &url));
        said.into_iter().for_each(|it| self.note(format!("{url}: {it}")));
        self.save();
    }

    /// An image was verified again, or one has come back from a store while the job runs.
    fn checked(&mut self, done: Checked) {
        match done {
            Checked::Verified { number, result } => {
                if self.record.shelf.get(number).is_none_or(|it| it.standing != Standing::Good) {
                    return;
                }
                match result {
                    Ok(()) => self.record.shelf.verified(number, now_ms()),
                    Err(Failed { bad_image: true, why }) => {
                        self.checks.suspect(self.record.shelf.built_on(number));
                        self.damaged(number, &why);
                    }
                    Err(Failed { why, .. }) => eprintln!("rekindle: image {number} was not verified again: {why}"),
                }
            }
            Checked::Received { copy, result } => {
                let result = result.and_then(|came| self.mend(&copy, &came));
                if let Err(Failed { why, .. }) = result {
                    self.note(format!("image {} does not come back from {}: {why}", copy.number, copy.url));
                }
                // What is left is removed by the next one otherwise.
                let _ = checks::clear_mended(&self.record);
            }
        }
        self.save();
    }

    /// Puts what has come from a store in the place of a damaged image, if that is still one, and one of those that are kept.
    fn mend(&mut self, Copy { number, url }: &Copy, came: &Path) -> Result<(), Failed> {
        let Record { wishes, copies, shelf, .. } = &self.record;
        let is_good = shelf.get(*number).is_some_and(|it| !matches!(it.standing, Standing::Damaged(_)));
        if is_good || !levels::is_wanted(shelf, wishes.keep, *number) || shelf.built_on(*number).next().is_some() {
            return Ok(());
        }
        let began_ms = copies.began_ms(*number, url).unwrap_or_default();
        Images::of(&self.record, &self.verbs).replace(*number, came)?;
        self.record.shelf.fetched(*number, began_ms);
        self.record.shelf.verified(*number, now_ms());
        self.note(format!("image {number} has come back from {url}"));
        Ok(())
    }

    fn restore(&mut self) {
        if let Some(left) = self.not_before.checked_duration_since(Instant::now()).filter(|it| !it.is_zero()) {
            if self.container.is_some() && self.looked_for_user.elapsed() > USER {
                self.remains();
                self.looked_for_user = Instant::now();
            }
            std::thread::sleep(left.min(LOOK));
            return;
        }
        // An image may have come back by now.
        if let Some(done) = self.checks.ended() {
            self.checked(done);
        }
        // The store may have by now what is damaged here.
        if let Some(done) = self.uploads.ended() {
            self.uploaded(done);
        }
        let Record { wishes, copies, shelf, .. } = &self.record;
        let newest = shelf.good().map(|it| it.number).find(|it| !self.passed_over.contains_key(it));
        let newest = newest.or_else(|| shelf.newest().map(|it| it.number));
        let copy = levels::source(&wishes.levels, copies, shelf, &self.fetched);
        if newest.is_none() && copy.is_none() && self.fetched.is_empty() {
            return self.happens(Event::NoImage, "there is no good image to restore".to_owned());
        }
        if !self.daemon_is_ready() {
            // No fault of the image's, and after a reboot the driver takes its time.
            self.not_before = Instant::now() + DAEMON;
            return;
        }
        let is_container = self.container.is_some();
        if is_container && self.remains().is_none() {
            return;
        }
        if !is_container && let Some(process) = self.restored_before() {
            return self.runs_again(process, RESTORED_BEFORE.to_owned());
        }
        if let Some(copy) = copy {
            if !self.checks.is_receiving(&copy) {
                return self.fetch(copy);
            }
            // It need not come twice.
            if let Some(done) = self.checks.wait_received() {
                self.checked(done);
            }
            self.fetched.insert(copy);
            return;
        }
        let Some(newest) = newest else {
            // A store may answer later.
            let number = self.fetched.pop_last().map_or(0, |it| it.number);
            self.fetched.clear();
            return self.not_restored(number, "no store has given an image");
        };
        // podman ends what is left of a container, whose processes are free to have other numbers than before.
        if !is_container && !job::kill(&self.record.tree, self.guard, Since::Long) {
            return self.not_restored(newest, "processes of the job do not end");
        }
        self.folder.forget_end();
        let dir = Images::of(&self.record, &self.verbs).dir(newest);
        if !dir.exists() {
            self.damaged(newest, GONE);
            self.save();
            return;
        }
        if is_container && !self.is_cleared_for(newest, &dir) {
            return;
        }
        self.cut_console(&dir);
        let began = Instant::now();
        match self.verbs.restore(&dir) {
            Ok(()) => self.restored(newest, began.elapsed()),
            Err(Failed { bad_image: true, why }) => {
                self.damaged(newest, &why);
                self.save();
            }
            Err(Failed { why, .. }) => self.not_restored(newest, &why),
        }
    }

    /// Brings an image back from a store.
    fn fetch(&mut self, copy: Copy) {
        let Copy { number, url } = &copy;
        let name = uploads::stored_name(&self.folder.name(), *number);
        self.checks.was_replaced(*number);
        match Images::of(&self.record, &self.verbs).fetch(*number, url, &name) {
            Ok(()) => {
                let began_ms = self.record.copies.began_ms(*number, url).unwrap_or_default();
                self.record.shelf.fetched(*number, began_ms);
                self.note(format!("image {number} has come back from {url}"));
                self.save();
            }
            Err(Failed { why, .. }) => self.note(format!("image {number} does not come back from {url}: {why}")),
        }
        // Also one that came: if it is no better than what was here, it is not fetched again and again.
        self.fetched.insert(copy);
    }

    /// The job, if a restore of the former supervisor has gone on to its end after that was killed: this one had to wait for the lock
    /// until then. The job's number then belongs to a client that was not there when the job failed.
    fn restored_before(&self) -> Option<Process> {
        let former = self.record.job?;
        let process = ended::process(former.pid).filter(|it| *it != former)?;
        Clients::of(&self.record.wishes.socket, &job::tree(process.pid)).map(|_| process)
    }

    /// What podman has of the container, in the inner option nothing, if that is what has failed, so that a restore may take its place. If
    /// not, this does what is to be done instead.
    fn remains(&mut self) -> Option<Option<Said>> {
        let Some(said) = self.container.as_mut().and_then(Asked::said) else {
            self.not_before = self.not_before.max(Instant::now() + DAEMON);
            return None;
        };
        let now = said.as_ref().and_then(|it| ended::process(it.state.pid));
        match (Said::found(said.as_ref(), self.record.job, now, self.record.removing), now) {
            (FoundContainer::Restored, Some(process)) => self.runs_again(process, RESTORED_BEFORE.to_owned()),
            (FoundContainer::Users, _) => {
                let what = "podman was told to end the container, to remove it, or to start it again: it is left alone";
                self.happens(Event::Stop, what.to_owned());
            }
            (FoundContainer::Away, _) => self.not_before = self.not_before.max(Instant::now() + DAEMON),
            (FoundContainer::Remains | FoundContainer::Restored, _) => return Some(said),
        }
        None
    }

    /// Verifies the archive of the image, which takes long, and removes then what is left of the container, if that is still nobody's.
    /// Whether the image can be restored now; if not, this has done what is to be done instead.
    fn is_cleared_for(&mut self, number: u64, dir: &Path) -> bool {
        match self.verbs.verify(dir) {
            Ok(()) => {}
            Err(Failed { bad_image: true, why }) => {
                self.damaged(number, &why);
                self.save();
                return false;
            }
            Err(Failed { why, .. }) => {
                self.not_restored(number, &why);
                return false;
            }
        }
        let mut why = String::new();
        // If conmon was killed, podman finds out only by the first attempt that the container has ended, and fails.
        for _ in 0..2 {
            let Some(said) = self.remains() else { return false };
            let was_removing = std::mem::replace(&mut self.record.removing, true);
            if !self.save() {
                // The next supervisor would take the mark that `podman rm` may leave for a user's.
                self.record.removing = was_removing;
                self.not_before = Instant::now() + DAEMON;
                return false;
            }
            let Some(container) = &self.record.wishes.container else { return false };
            let by_force = said.as_ref().is_some_and(Said::is_to_be_ended);
            match self.verbs.remove(container, by_force) {
                Ok(()) => return true,
                Err(error) => why = format!("{error:#}"),
            }
            // Without such a mark, one that comes later is a user's.
            let said = self.container.as_mut().and_then(Asked::said);
            self.record.removing = said.is_none_or(|it| it.is_none_or(|it| it.is_users()));
        }
        self.not_restored(number, &why);
        false
    }

    fn daemon_is_ready(&self) -> bool {
        let asked = daemon::ask(&self.record.wishes.socket, &Request::Status);
        matches!(asked, Ok(Reply::Status(status)) if status.problem.is_none())
    }

    fn restored(&mut self, number: u64, took: Duration) {
        self.record.restore_seconds = took.as_secs_f64();
        // A job that has ended already is found out by `watch`.
        let process = match &mut self.container {
            None => {
                let pid = self.record.job.map_or(0, |it| it.pid);
                ended::process(pid).unwrap_or(Process { pid, started: u64::MAX })
            }
            Some(container) => {
                let Some(said) = container.said() else {
                    // It is found as one that was restored as soon as podman answers. What happens to it until then, users do.
                    self.record.removing = false;
                    self.not_before = Instant::now() + DAEMON;
                    self.save();
                    return;
                };
                let pid = said.map_or(0, |it| it.state.pid);
                ended::process(pid).unwrap_or(Process { pid, started: 0 })
            }
        };
        for (failed, why) in std::mem::take(&mut self.passed_over) {
            if failed != number {
                self.set_aside(failed, &why);
            }
        }
        self.runs_again(process, format!("the job was restored from image {number}"));
    }

    fn runs_again(&mut self, process: Process, what: String) {
        self.record.job = Some(process);
        self.record.removing = false;
        self.fetched.clear();
        self.passed_over.clear();
        let tree = job::tree(process.pid);
        // Of one that has ended already, something may be left with the numbers of those before.
        if !tree.is_empty() {
            self.record.tree = tree;
        }
        self.record.restores = self.record.restores.saturating_add(1);
        // The interval counts from here on.
        self.not_before = Instant::now() + choice(&self.record).interval();
        self.happens(Event::Restored, what);
    }

    fn not_restored(&mut self, number: u64, why: &str) {
        let tries = if self.failed_image.0 == number { self.failed_image.1 + 1 } else { 1 };
        self.failed_image = (number, tries);
        if tries >= TRIES && self.container.is_some() {
            // A port, an address or the name may be taken, which is no fault of the archive's.
            self.passed_over.insert(number, why.to_owned());
            self.failed_image = (0, 0);
            if self.record.shelf.good().all(|it| self.passed_over.contains_key(&it.number)) {
                self.passed_over.clear();
            }
        } else if tries >= TRIES && self.record.shelf.good().nth(1).is_some() {
            self.set_aside(number, why);
        }
        self.happens(Event::NotRestored(why.to_owned()), format!("image {number} was not restored: {why}"));
        if let Phase::Restoring { failed, .. } = self.record.phase
            && self.container.is_some()
        {
            self.not_before = Instant::now() + phase::pause_for_podman(failed);
        }
    }

    fn damaged(&mut self, number: u64, why: &str) {
        self.record.shelf.damaged(number, why);
        self.note(format!("image {number} is set aside, for it is damaged: {why}"));
    }

    fn set_aside(&mut self, number: u64, why: &str) {
        self.record.shelf.set_aside(number, why);
        self.note(format!("image {number} is set aside: {why}"));
    }

    /// The job of a command writes again what it wrote after the image: the files have what it had written by then.
    fn cut_console(&self, dir: &Path) {
        if self.record.wishes.command.is_empty() {
            return;
        }
        for path in self.folder.console() {
            let cut = |length| append(&path).and_then(|it| Ok(it.set_len(length)?));
            if let Some(length) = cpu_image::written(dir, &path)
                && let Err(error) = cut(length)
            {
                eprintln!("rekindle: {error:#}");
            }
        }
    }

    fn happens(&mut self, event: Event, what: String) {
        self.record.phase = std::mem::take(&mut self.record.phase).next(event, self.record.wishes.rules);
        if let Phase::Restoring { .. } = self.record.phase {
            self.not_before = Instant::now() + self.record.phase.pause();
        }
        self.note(what);
        self.save();
    }

    fn note(&mut self, what: String) {
        eprintln!("rekindle: {what}");
        self.record.note(now_ms(), what);
    }

    /// Writes the record. On a full disk the former one stays, and this one is written later.
    fn save(&mut self) -> bool {
        let written = self.record.write(self.folder.path());
        if let Err(error) = &written
            && !self.unwritten
        {
            eprintln!("rekindle: {error}");
        }
        self.unwritten = written.is_err();
        !self.unwritten
    }

    fn finish(&mut self) {
        if let Some(done) = self.uploads.wait() {
            self.uploaded(done);
        }
        if let Some(done) = self.checks.wait_received() {
            self.checked(done);
        }
        while self.unwritten && !self.save() {
            std::thread::sleep(LOOK);
        }
    }
}

/// Milliseconds since 1970.
pub(super) fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

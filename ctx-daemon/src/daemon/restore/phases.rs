//! How far a restore is, and how long its parts took: for a command that watches the restore, and for the account that is kept
//! beside the image.
//!
//! ```text
//!   Restore ──► check ─ workers ─ prepare ─┬─ criu ─ connect ─ wait ─ ... ─ open ──► the processes run
//!                                          └─ code ─ replay ─ map ─ content ─ hash     each client's worker, meanwhile
//!                                                                           └───────────────► all is loaded
//! ```
//!
//! The parts above follow each other, and their sum is the time until the processes run. A client is one place in the image's
//! order. The threads that load hold this beyond the restore itself, which is over when the rings are open.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rekindle_images::{
    Account, Checksum, Client as Record, Image, ImageDir, LastRestore, RestorePhase, RestoredClient,
};
use rekindle_wire::control::{
    Failure, FailureKind, LOAD_STEPS, LoadTimes, PhaseInfo, RestoreInfo, RestoredInfo, TraceParent,
};
use tracing::debug;

use super::super::metrics::{Metrics, Restored, Start};
use super::super::spans::Spans;
use super::super::{lock, thread, wait_timeout};
use super::hold::Hold;
use super::spans::{self, Command, Load, Stretch};

/// The name of the phase in which complete processes wait for a command.
const HELD: &str = "held";
/// How long the processes wait until the watchers have heard that they are about to run.
const HEARING: Duration = Duration::from_millis(200);
/// The most parts that are remembered one by one: there are some for each process.
const MOST_PARTS: usize = 256;
/// The number of the step of a load in which content is loaded.
const CONTENT: usize = LOAD_STEPS.len() - 1;

/// A part of a restore until the processes run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The image is opened and checked.
    Check,
    /// Workers are taken from the pool.
    Workers,
    /// The GPUs are compared with the image's, memory that clients share is made, and the loads begin.
    Prepare,
    /// CRIU makes the processes.
    Criu,
    /// A complete process waits until its worker has loaded what it must have to run.
    Wait,
    /// Processes are connected with their workers.
    Connect,
    /// The rings are opened.
    Open,
}

impl Part {
    const ALL: [Self; 7] =
        [Self::Check, Self::Workers, Self::Prepare, Self::Criu, Self::Wait, Self::Connect, Self::Open];

    fn as_str(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Workers => "workers",
            Self::Prepare => "prepare",
            Self::Criu => "criu",
            Self::Wait => "wait",
            Self::Connect => "connect",
            Self::Open => "open",
        }
    }
}

/// The progress and the times of a restore.
pub(in crate::daemon) struct Phases {
    began: Instant,
    state: Mutex<State>,
    heard: Condvar,
    hold: Hold,
    metrics: Arc<Metrics>,
    spans: Arc<Spans>,
    /// The restore's span; none if nobody wants its spans.
    place: Option<TraceParent>,
    command: Command,
}

struct State {
    /// When the last part ended.
    mark: Instant,
    /// How long each of [`Part::ALL`] took.
    spent: [Duration; Part::ALL.len()],
    /// When the parts began and ended, the first ones.
    parts: Vec<Stretch>,
    /// The present part, until the loads have begun.
    now: Part,
    clients: Vec<Loading>,
    /// When the processes could run, and when all content was loaded, since the beginning.
    running: Option<Duration>,
    loaded: Option<Duration>,
    /// Whether the account of the restore was written, if it can be.
    over: bool,
    failure: Option<Failure>,
    /// What was ready for the image.
    source: Start,
    /// Whether the metrics have heard of the end, or need not hear of it.
    is_recorded: bool,
    /// The image that the account is written beside, until the file is made.
    image: Option<(ImageDir, Checksum)>,
    /// The file of the account, made while CRIU still has the directory: whoever removes it afterwards finds no new file there.
    file: Option<(Account, Checksum)>,
    /// The watchers who must hear that the processes are about to run, and have not.
    unaware: usize,
}

/// The load of one client.
#[derive(Debug)]
struct Loading {
    namespace_pid: u32,
    command: String,
    pid: Option<i32>,
    /// The worker, and when it began and ended.
    worker: Option<(i32, Instant)>,
    ended: Option<Instant>,
    /// When steps began.
    steps: Vec<(usize, Instant)>,
    /// The present step, one of [`LOAD_STEPS`], and when it began. Workers before control version 12 do not tell it.
    step: Option<(usize, Instant)>,
    /// How long the steps before took.
    spent: [Option<Duration>; LOAD_STEPS.len()],
    done: u64,
    bytes: u64,
    /// Whether the load is over, and the worker's own times.
    over: bool,
    times: Option<LoadTimes>,
}

impl Default for Phases {
    fn default() -> Self {
        Self::new(Arc::default(), Arc::default(), None)
    }
}

impl Phases {
    /// A restore begins, which this command may have begun; the metrics hear of its end.
    pub(super) fn new(metrics: Arc<Metrics>, spans: Arc<Spans>, command: Command) -> Self {
        let now = Instant::now();
        let state = State {
            mark: now,
            spent: Default::default(),
            parts: Vec::new(),
            now: Part::Check,
            clients: Vec::new(),
            running: None,
            loaded: None,
            over: false,
            failure: None,
            source: Start::default(),
            is_recorded: false,
            image: None,
            file: None,
            unaware: 0,
        };
        let place = spans.begin(command.map(|(_, it)| it.span));
        Self {
            began: now,
            state: Mutex::new(state),
            heard: Condvar::new(),
            hold: Hold::default(),
            metrics,
            spans,
            place,
            command,
        }
    }

    /// The directory has no image of Rekindle, so this is no restore of ours.
    pub(super) fn is_not_ours(&self) {
        lock(&self.state).is_recorded = true;
    }

    /// Whether a command holds the processes when they are complete.
    pub(super) fn hold(&self) -> &Hold {
        &self.hold
    }

    /// Sets what was ready for the image.
    pub(super) fn finds(&self, source: Start) {
        lock(&self.state).source = source;
    }

    /// A part ends: it has taken the time since the last one ended.
    pub(super) fn ends(&self, part: Part) {
        lock(&self.state).ends(part, Instant::now());
    }

    /// Sets the image and its clients, in the order of their places.
    pub(super) fn restores<'a>(&self, image: &Image, clients: impl Iterator<Item = &'a Record>) {
        let dir = image.dir().try_clone().inspect_err(|error| debug!(%error, "no account of this restore is written"));
        let mut state = lock(&self.state);
        state.image = dir.ok().map(|dir| (dir, image.manifest_hash()));
        state.clients = clients.map(Loading::of).collect();
    }

    /// A worker begins its load.
    pub(super) fn load_begins(&self, place: usize, worker: i32) {
        if let Some(client) = lock(&self.state).clients.get_mut(place) {
            client.worker = Some((worker, Instant::now()));
        }
    }

    /// When the restore began.
    pub(super) fn began(&self) -> Instant {
        self.began
    }

    /// A worker begins a step of its load.
    pub(super) fn step(&self, place: usize, name: &str) {
        let step = LOAD_STEPS.iter().position(|it| *it == name);
        if let (Some(step), Some(client)) = (step, lock(&self.state).clients.get_mut(place)) {
            client.begins(step);
        }
    }

    /// A worker has loaded so many bytes of content.
    pub(super) fn content(&self, place: usize, done: u64, bytes: u64) {
        if let Some(client) = lock(&self.state).clients.get_mut(place) {
            if client.step.is_none_or(|(step, _)| step < CONTENT) {
                client.begins(CONTENT);
            }
            (client.done, client.bytes) = (done, bytes);
        }
    }

    /// A client's process is complete.
    pub(super) fn connected(&self, place: usize, pid: i32) {
        if let Some(client) = lock(&self.state).clients.get_mut(place) {
            client.pid = Some(pid);
        }
    }

    /// A worker has loaded everything. An older worker does not tell the times.
    pub(super) fn loaded(self: &Arc<Self>, place: usize, times: Option<LoadTimes>) {
        if let Some(client) = lock(&self.state).clients.get_mut(place) {
            client.bytes = times.map_or(client.bytes, |it| it.bytes);
            client.done = client.bytes;
            (client.times, client.over, client.ended) = (times, true, Some(Instant::now()));
        }
        self.end_if_loaded();
    }

    /// A process has ended before its content was there. There is nothing to wait for, and no account of a load.
    pub(super) fn ended(self: &Arc<Self>, place: usize) {
        {
            let mut state = lock(&self.state);
            state.image = None;
            if let Some(client) = state.clients.get_mut(place) {
                client.over = true;
            }
            let file = state.file.take();
            drop(state);
            if let Some((file, _)) = file {
                file.remove();
            }
        }
        self.end_if_loaded();
    }

    /// The rings are open: the processes may run.
    pub(super) fn runs(self: &Arc<Self>) {
        let now = Instant::now();
        let image = {
            let mut state = lock(&self.state);
            state.ends(Part::Open, now);
            state.image.take()
        };
        let file = image.and_then(|(dir, manifest)| {
            let begun = LastRestore::begin(&dir).inspect_err(|error| debug!(%error, "no account is written"));
            Some((begun.ok()?, manifest))
        });
        {
            let mut state = lock(&self.state);
            state.running = Some(now.saturating_duration_since(self.began));
            state.file = file;
        }
        self.end_if_loaded();
    }

    /// The restore has failed, or a load after it. The first failure counts.
    pub(super) fn failed(&self, failure: &Failure) {
        let mut state = lock(&self.state);
        let mut record = None;
        if !state.over {
            state.failure.get_or_insert_with(|| failure.clone());
            record = state.must_record();
        }
        state.image = None;
        let file = state.file.take();
        drop(state);
        if let Some(source) = record {
            self.metrics.restore_failed(failure.kind, source);
            self.trace();
        }
        if let Some((file, _)) = file {
            file.remove();
        }
    }

    /// The restore's connection has closed.
    fn end(&self) {
        let mut state = lock(&self.state);
        if state.running.is_none() {
            let reason = "given up: CRIU ended, or was ended, before the processes were complete";
            state.failure.get_or_insert_with(|| Failure::new(FailureKind::GivenUp, reason));
            state.image = None;
            let record = state.must_record();
            drop(state);
            if let Some(source) = record {
                self.metrics.restore_failed(FailureKind::GivenUp, source);
                self.trace();
            }
        }
    }

    /// One more watcher must hear that the processes are about to run.
    pub(super) fn must_be_heard(&self) {
        lock(&self.state).unaware += 1;
    }

    /// A watcher has heard it, or is gone.
    pub(super) fn is_heard(&self) {
        let mut state = lock(&self.state);
        state.unaware = state.unaware.saturating_sub(1);
        self.heard.notify_all();
    }

    /// Whether nobody need be waited for who must hear that the processes are about to run.
    #[cfg(test)]
    pub(super) fn is_heard_by_all(&self) -> bool {
        lock(&self.state).unaware == 0
    }

    /// Waits until the watchers have heard that the processes are about to run, or a moment.
    pub(super) fn wait_until_heard(&self) {
        let begins = Instant::now();
        let mut state = lock(&self.state);
        while state.unaware > 0
            && let Some(left) = HEARING.checked_sub(begins.elapsed())
        {
            state = wait_timeout(&self.heard, state, left);
        }
    }

    /// Writes the account when the processes run and everything is loaded. The disk may be slow, so a thread of its own does it.
    fn end_if_loaded(self: &Arc<Self>) {
        let (account, file, record) = {
            let mut state = lock(&self.state);
            let all = state.clients.iter().all(|it| it.over);
            let Some(running) = state.running else { return };
            if !all || state.loaded.is_some() || state.failure.is_some() {
                return;
            }
            let loaded = self.began.elapsed();
            state.loaded = Some(loaded);
            let record = state.must_record().map(|source| {
                let loads: Vec<_> = state.clients.iter().filter_map(|it| it.times).collect();
                (source, running, loaded, state.phases(), loads)
            });
            (state.account(), state.file.take(), record)
        };
        if let Some((source, running, loaded, phases, loads)) = record {
            self.metrics.restore_done(&Restored { source, running, loaded, phases: &phases, loads: &loads });
            self.trace();
        }
        let phases = Arc::clone(self);
        let write = move || {
            if let Some((file, manifest)) = file
                && let Err(error) = file.write(&account, manifest)
            {
                debug!(%error, "cannot write an account of the restore");
            }
            lock(&phases.state).over = true;
        };
        if let Err(error) = thread("account", write) {
            debug!(%error, "cannot write an account of the restore");
            lock(&self.state).over = true;
        }
    }

    /// Exports the spans of a restore that is over.
    fn trace(&self) {
        let Some(place) = self.place else { return };
        let ended = Instant::now();
        let state = lock(&self.state);
        let loads: Vec<_> = state.clients.iter().filter_map(|it| it.traced(ended)).collect();
        let (mut batch, mut own) = spans::of(place, self.command, (self.began, ended), &state.parts, &loads);
        own.set("rekindle.image.ready", state.source.as_str());
        if let Some(running) = state.running {
            own.set("rekindle.running.ns", nanoseconds(running));
        }
        if let Some(failure) = &state.failure {
            own.set("rekindle.phase", state.phase()).set("error.type", failure.kind.as_str());
            own.failure = Some(failure.reason.clone());
        }
        drop(state);
        batch.push(own);
        self.spans.send(batch);
    }

    /// The progress for a watcher.
    pub(super) fn info(&self) -> RestoreInfo {
        let state = lock(&self.state);
        RestoreInfo {
            phase: if self.hold.holds() { HELD } else { state.phase() }.to_owned(),
            done: sum(state.clients.iter().map(|it| it.done.min(it.bytes))),
            bytes: sum(state.clients.iter().map(|it| it.bytes)),
            phases: state.phases().into_iter().map(|(name, time)| info(name, time, 0)).collect(),
            clients: state.clients.iter().map(Loading::info).collect(),
            running_ns: state.running.map(nanoseconds),
            loaded_ns: state.loaded.filter(|_| state.over).map(nanoseconds),
            failure: state.failure.clone(),
        }
    }
}

impl State {
    /// What was ready for the image, if the metrics must hear of the end now.
    fn must_record(&mut self) -> Option<Start> {
        (!std::mem::replace(&mut self.is_recorded, true)).then_some(self.source)
    }

    fn ends(&mut self, part: Part, now: Instant) {
        if self.parts.len() < MOST_PARTS {
            self.parts.push((part.as_str(), self.mark, now));
        }
        self.spent[part as usize] += now.saturating_duration_since(self.mark);
        self.mark = now;
        self.now = match part {
            Part::Check => Part::Workers,
            Part::Workers => Part::Prepare,
            _ => Part::Criu,
        };
    }

    /// The parts that have taken time so far.
    fn phases(&self) -> Vec<(&'static str, Duration)> {
        let parts = Part::ALL.into_iter().map(|it| (it.as_str(), self.spent[it as usize]));
        parts.filter(|(_, spent)| !spent.is_zero()).collect()
    }

    /// The name of the present phase. Of several clients that of the last one.
    fn phase(&self) -> &'static str {
        if self.now != Part::Criu {
            return self.now.as_str();
        }
        let steps = self.clients.iter().filter(|it| !it.over).map(|it| it.step.map(|(step, _)| step));
        match steps.min() {
            None => Part::Criu.as_str(),
            Some(None) => "load",
            Some(Some(step)) => LOAD_STEPS[step],
        }
    }

    fn account(&self) -> LastRestore {
        let phase = |it: PhaseInfo| RestorePhase { name: it.name, duration_ns: it.duration_ns, bytes: it.bytes };
        let client = |it: &Loading| {
            let RestoredInfo { namespace_pid, command, bytes, zero_bytes, copied_bytes, phases, .. } = it.info();
            let phases = phases.into_iter().map(phase).collect();
            RestoredClient { namespace_pid, command, bytes, zero_bytes, copied_bytes, phases }
        };
        LastRestore {
            time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |it| it.as_secs()),
            host: std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim_end().to_owned(),
            rekindle_version: env!("CARGO_PKG_VERSION").to_owned(),
            running_ns: self.running.map_or(0, nanoseconds),
            loaded_ns: self.loaded.map_or(0, nanoseconds),
            phases: self.phases().into_iter().map(|(name, time)| phase(info(name, time, 0))).collect(),
            clients: self.clients.iter().map(client).collect(),
        }
    }
}

impl Loading {
    fn of(record: &Record) -> Self {
        Self {
            namespace_pid: record.namespace_pid,
            command: record.command.clone(),
            pid: None,
            worker: None,
            ended: None,
            steps: Vec::new(),
            step: None,
            spent: Default::default(),
            done: 0,
            bytes: sum(record.allocations.iter().map(|it| it.size)),
            over: false,
            times: None,
        }
    }

    /// A step begins, and so the one before it ends.
    fn begins(&mut self, step: usize) {
        let now = Instant::now();
        // A step begins once, unless a worker says otherwise.
        if self.steps.len() < LOAD_STEPS.len() {
            self.steps.push((step, now));
        }
        if let Some((before, began)) = self.step.replace((step, now)) {
            *self.spent[before].get_or_insert_default() += now.saturating_duration_since(began);
        }
    }

    /// The load as spans are made of it; none if it has not begun.
    fn traced(&self, now: Instant) -> Option<Load> {
        let (worker, began) = self.worker?;
        let ended = self.ended.unwrap_or(now);
        let ends = self.steps.iter().skip(1).map(|(_, at)| *at).chain([ended]);
        let steps = self.steps.iter().zip(ends).map(|((step, from), to)| (LOAD_STEPS[*step], *from, to.max(*from)));
        let (pid, command, bytes) = (self.pid, self.command.clone(), self.bytes);
        Some(Load { worker, pid, command, bytes, times: (began, ended), steps: steps.collect() })
    }

    fn info(&self) -> RestoredInfo {
        let phases = match self.times {
            Some(LoadTimes { code_ns, replay_ns, map_ns, content_ns, hash_ns, bytes, set, .. }) => {
                let [code, replay, map, content] = LOAD_STEPS;
                let of = |name, ns, bytes| info(name, Duration::from_nanos(ns), bytes);
                let copied = bytes.saturating_sub(set);
                vec![
                    of(code, code_ns, 0),
                    of(replay, replay_ns, 0),
                    of(map, map_ns, 0),
                    of(content, content_ns, copied),
                    of("hash", hash_ns, 0),
                ]
            }
            None => {
                let steps = LOAD_STEPS.into_iter().zip(self.spent);
                steps.filter_map(|(name, spent)| Some(info(name, spent?, 0))).collect()
            }
        };
        RestoredInfo {
            pid: self.pid,
            namespace_pid: self.namespace_pid,
            command: self.command.clone(),
            bytes: self.bytes,
            zero_bytes: self.times.map_or(0, |it| it.set),
            copied_bytes: self.times.map_or(0, |it| it.copied),
            phases,
        }
    }
}

/// The phases of a restore that goes on. When this is dropped, the restore's connection is closed.
pub(super) struct Tracked(pub(super) Arc<Phases>);

impl Drop for Tracked {
    fn drop(&mut self) {
        self.0.end();
    }
}

fn info(name: &str, time: Duration, bytes: u64) -> PhaseInfo {
    PhaseInfo { name: name.to_owned(), duration_ns: nanoseconds(time), bytes }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Of numbers that an image may have chosen.
fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_images::Allocation;

    fn of(clients: usize) -> Arc<Phases> {
        let phases = Arc::<Phases>::default();
        let allocations = vec![Allocation { size: 10, ..Allocation::default() }];
        let record = Record { allocations, ..Record::default() };
        lock(&phases.state).clients = (0..clients).map(|_| Loading::of(&record)).collect();
        phases
    }

    fn wait_until_over(phases: &Phases) -> RestoreInfo {
        let began = Instant::now();
        while phases.info().loaded_ns.is_none() {
            assert!(began.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
        phases.info()
    }

    fn names(phases: &[PhaseInfo]) -> Vec<&str> {
        phases.iter().map(|it| it.name.as_str()).collect()
    }

    #[test]
    fn the_parts_follow_each_other_and_are_all_of_the_time() {
        let phases = of(1);
        for part in [Part::Check, Part::Workers, Part::Prepare, Part::Criu, Part::Connect, Part::Wait, Part::Connect] {
            std::thread::sleep(Duration::from_millis(1));
            phases.ends(part);
        }
        phases.runs();
        let info = phases.info();
        assert_eq!(names(&info.phases)[..6], ["check", "workers", "prepare", "criu", "wait", "connect"]);
        assert_eq!(info.phases.iter().map(|it| it.duration_ns).sum::<u64>(), info.running_ns.unwrap());
        assert_eq!(info.loaded_ns, None);
        phases.loaded(0, None);
        assert!(wait_until_over(&phases).loaded_ns > info.running_ns);
    }

    #[test]
    fn the_last_client_says_how_far_the_restore_is() {
        let phases = of(2);
        let phase = || phases.info().phase;
        let shown = [Part::Check, Part::Workers, Part::Prepare].map(|part| {
            let shown = phase();
            phases.ends(part);
            shown
        });
        assert_eq!((shown, phase()), (["check", "workers", "prepare"].map(str::to_owned), "load".to_owned()));
        phases.step(0, "replay");
        assert_eq!(phase(), "load");
        phases.step(1, "code");
        assert_eq!(phase(), "code");
        phases.step(1, "of a later version");
        phases.content(1, 4, 20);
        assert_eq!((phase(), phases.info().done, phases.info().bytes), ("replay".to_owned(), 4, 30));
        phases.content(0, 5, 10);
        assert_eq!((phase(), phases.info().done), ("content".to_owned(), 9));
        assert_eq!(names(&phases.info().clients[1].phases), ["code"]);
        let times = LoadTimes { bytes: 20, set: 5, content_ns: 7, ..LoadTimes::default() };
        phases.loaded(1, Some(times));
        phases.loaded(0, None);
        assert_eq!((phase(), phases.info().done), ("criu".to_owned(), 30));
        let client = &phases.info().clients[1];
        assert_eq!(names(&client.phases), ["code", "replay", "map", "content", "hash"]);
        assert_eq!((client.zero_bytes, client.phases[3].bytes, client.phases[3].duration_ns), (5, 15, 7));
        phases.runs();
        wait_until_over(&phases);
    }

    #[test]
    fn the_first_failure_counts_and_one_that_comes_too_late_does_not() {
        let phases = of(1);
        let failure = Failure::internal("first");
        phases.failed(&failure);
        phases.failed(&Failure::internal("second"));
        phases.end();
        assert_eq!(phases.info().failure, Some(failure));
        let given_up = of(1);
        given_up.end();
        assert_eq!(given_up.info().failure.map(|it| it.kind), Some(FailureKind::GivenUp));
        let done = of(1);
        done.runs();
        done.loaded(0, None);
        wait_until_over(&done);
        done.failed(&Failure::internal("late"));
        done.end();
        assert_eq!(done.info().failure, None);
    }

    #[test]
    fn processes_wait_for_those_who_must_hear_and_not_for_ever() {
        let phases = of(0);
        phases.wait_until_heard();
        phases.must_be_heard();
        let began = Instant::now();
        phases.wait_until_heard();
        assert!(began.elapsed() >= HEARING);
        let waits = Arc::clone(&phases);
        let waiting = std::thread::spawn(move || waits.wait_until_heard());
        phases.is_heard();
        waiting.join().unwrap();
        assert_eq!(lock(&phases.state).unaware, 0);
    }
}

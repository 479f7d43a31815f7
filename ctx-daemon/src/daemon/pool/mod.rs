//! Workers that are ready before a client needs one: CUDA is initialised, and contexts are made.
//!
//! ```text
//!               want more                ready
//!   (nothing) ─────────────► starting ──────────► ready ──────────► taken, for one client, never to come back
//!        ▲                      │ failed            │ dies               take
//!        │                      │                   │ or is one too many
//!        └── wait, longer ◄─────┘                   └──► (nothing)
//!            each time
//! ```
//!
//! Workers are of several kinds ([`kind`]), and the pool learns how many of each to keep ([`demand`]). A start that fails delays
//! the next start of its kind only.
//!
//! A worker whose start takes long no longer counts as starting: the pool starts another in its place. The slow worker may
//! still become ready, and is killed when its time is up. Only a few may be so slow: if the driver hangs, more do not help.
//!
//! One thread keeps the pool filled. Each start of a worker has a thread of its own; there are more while a client waits. A
//! start that no client waits for stays away from restores for a while ([`Pool::hold_off`]).

mod demand;
mod kind;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rekindle_wire::attach::{Attached, Device};
use rekindle_wire::control::{Failing, FailureKind, WorkerKindInfo};
use thiserror::Error;
use tracing::{debug, error, info};

use self::demand::Bursts;
use self::kind::Kind;
use super::grants::Uuid;
use super::metrics::{Metrics, Taken};
use super::spawn::{Settings, SpawnError, Spawner};
use super::worker::Worker;
use super::{lock, thread, wait, wait_timeout};
use crate::config::Spares;

/// A client waits for a worker longer than a start may take, so that the client hears why the start has failed.
const TAKE_SLACK: Duration = Duration::from_secs(10);
/// The wait after a failure, which doubles with each.
const BACK_OFF: Duration = Duration::from_millis(500);
const BACK_OFF_MAX: Duration = Duration::from_secs(30);
/// The wait after a failure while a client needs a worker.
const BACK_OFF_WANTED: Duration = Duration::from_secs(1);
/// The most starts at a time. More are not quicker: the driver does most of a start under one lock.
const STARTING_MAX: usize = 8;
/// The most slow starts that are replaced.
const SLOW_MAX: usize = 4;

/// The longest time for which restores delay a start that no client waits for.
const HOLD_OFF_MAX: Duration = Duration::from_secs(1);
/// The most kinds without workers that are remembered.
const KINDS_MAX: usize = 64;

/// Why the pool has no worker.
#[derive(Clone, Debug, Error)]
pub(crate) enum PoolError {
    #[error("no worker: {0}")]
    Start(#[from] StartError),
    #[error(
        "no worker within {} s: the GPUs are busy or the daemon is overloaded; see its log", .0.as_secs()
    )]
    Timeout(Duration),
    #[error("the daemon is stopping")]
    Closed,
}

impl Failing for PoolError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Start(_) => FailureKind::Internal,
            Self::Timeout(_) => FailureKind::Timeout,
            Self::Closed => FailureKind::LostPeer,
        }
    }
}

/// Why no worker becomes ready.
#[derive(Clone, Debug, Error)]
pub(crate) enum StartError {
    #[error(transparent)]
    Spawn(#[from] Arc<SpawnError>),
    #[error("workers die before they are used; see the daemon's log")]
    Died,
}

/// The spare workers.
pub(crate) struct Pool {
    spawner: Spawner,
    spares: Spares,
    state: Mutex<State>,
    changed: Condvar,
    metrics: Arc<Metrics>,
}

/// How many workers there are of the kinds of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) ready: usize,
    pub(crate) starting: usize,
    /// To be kept ready.
    pub(crate) kept: usize,
    /// Callers that wait for one.
    pub(crate) waiting: usize,
}

#[derive(Default)]
struct State {
    kinds: BTreeMap<Kind, Workers>,
    /// The number of starts that take long, and were replaced.
    slow: usize,
    /// The message of the last worker of the usual kind that became ready.
    seen: Option<Attached>,
    /// The number of callers that only want the message of the next worker of the usual kind that becomes ready.
    curious: usize,
    /// Restores that begin, and since when there has been at least one.
    restores: usize,
    restores_since: Option<Instant>,
    closed: bool,
}

/// The workers of one kind.
#[derive(Default)]
struct Workers {
    ready: Vec<Arc<Worker>>,
    starting: usize,
    /// The number of callers that wait for a worker.
    wanted: usize,
    bursts: Bursts,
    /// Counts attempts, so that a client that waits can tell whether a failed attempt began after the client asked.
    begun: u64,
    /// The latest attempt whose worker became ready.
    came_up: u64,
    failure: Option<Failure>,
    failures: u32,
}

struct Failure {
    attempt: u64,
    at: Instant,
    error: StartError,
}

impl Workers {
    /// When the next worker may be started; none if there are enough. `asked` counts callers that wait, and `spare` the workers
    /// to be kept besides, which are not started before `spares_from`.
    fn next_start(&self, asked: usize, spare: usize, spares_from: Instant, now: Instant) -> Option<Instant> {
        let here = self.ready.len() + self.starting;
        if here >= asked + spare {
            return None;
        }
        let from = if here < asked { now } else { spares_from };
        let Some(failure) = &self.failure else {
            return Some(from);
        };
        // After a failure there is one attempt at a time.
        if self.starting > 0 {
            return None;
        }
        let doubled = BACK_OFF.saturating_mul(1 << self.failures.saturating_sub(1).min(10));
        let back_off = doubled.min(if asked > 0 { BACK_OFF_WANTED } else { BACK_OFF_MAX });
        Some(from.max(failure.at + back_off))
    }

    /// The error of an attempt that began after a caller asked, when `begun` was `asked`.
    fn failed_since(&self, asked: u64) -> Option<PoolError> {
        let failure = self.failure.as_ref().filter(|it| it.attempt > asked && self.starting == 0)?;
        Some(failure.error.clone().into())
    }

    /// Notes that a start has failed, or that a spare worker has died.
    fn failed(&mut self, attempt: u64, error: StartError) {
        self.failures = self.failures.saturating_add(1);
        self.failure = Some(Failure { attempt, at: Instant::now(), error });
    }

    fn is_idle(&self) -> bool {
        self.ready.is_empty() && self.starting == 0 && self.wanted == 0
    }

    /// Whether a failure may still delay the next start.
    fn is_delayed(&self, now: Instant) -> bool {
        self.failure.as_ref().is_some_and(|failure| now < failure.at + BACK_OFF_MAX)
    }
}

/// What the thread that fills the pool does next.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Start(Kind),
    /// Nothing before this time, unless the state changes.
    At(Option<Instant>),
}

impl State {
    /// The workers of the usual kind.
    fn usual(&mut self) -> &mut Workers {
        self.kinds.entry(Kind::default()).or_default()
    }

    fn count(&self, workers: impl Fn(&Workers) -> usize) -> usize {
        self.kinds.values().map(workers).sum()
    }

    fn targets(&self, spares: &Spares) -> BTreeMap<Kind, usize> {
        spares.targets(self.kinds.iter().map(|(kind, workers)| (kind, &workers.bursts)))
    }

    /// Forgets what was long ago. Returns ready workers that are too many now; they are in the pool no more.
    fn forget(&mut self, spares: &Spares, now: Instant) -> Vec<Arc<Worker>> {
        if let Some(time) = now.checked_sub(spares.remember) {
            self.kinds.values_mut().for_each(|workers| workers.bursts.forget_before(time));
        }
        let targets = self.targets(spares);
        let mut surplus = Vec::new();
        for (kind, workers) in &mut self.kinds {
            let enough = targets.get(kind).copied().unwrap_or(0) + workers.wanted;
            surplus.extend(workers.ready.drain(enough.min(workers.ready.len())..));
        }
        self.kinds
            .retain(|kind, it| kind.is_usual() || !it.is_idle() || it.bursts.oldest().is_some() || it.is_delayed(now));
        while self.count(|it| usize::from(it.is_idle())) > KINDS_MAX {
            let idle = self.kinds.iter().filter(|(kind, it)| !kind.is_usual() && it.is_idle());
            let oldest = idle.min_by_key(|(_, it)| it.bursts.oldest()).map(|(kind, _)| kind.clone());
            let Some(oldest) = oldest else { break };
            self.kinds.remove(&oldest);
        }
        surplus
    }

    fn next(&self, spares: &Spares, now: Instant) -> Next {
        let targets = self.targets(spares);
        let spares_from = self.restores_since.map_or(now, |since| (since + HOLD_OFF_MAX).max(now));
        let none = Workers::default();
        let start = |kind: &Kind| {
            let workers = self.kinds.get(kind).unwrap_or(&none);
            let kept = targets.get(kind).copied().unwrap_or(0);
            // A caller that only wants the message does not take the worker.
            let curious = if kind.is_usual() { self.curious.min(1) } else { 0 };
            let asked = workers.wanted.max(curious);
            let spare = (workers.wanted + kept).saturating_sub(asked);
            Some((workers.next_start(asked, spare, spares_from, now)?, kind.clone()))
        };
        let usual = Kind::default();
        let first = self.kinds.keys().chain([&usual]).filter_map(start).min();
        let full = self.count(|it| it.starting) >= STARTING_MAX;
        match first {
            Some((at, kind)) if at <= now && !full => Next::Start(kind),
            first => {
                let start = first.map(|(at, _)| at).filter(|_| !full);
                let forget =
                    self.kinds.values().filter_map(|it| it.bursts.oldest()?.checked_add(spares.remember)).min();
                Next::At(start.into_iter().chain(forget).min())
            }
        }
    }
}

/// While it exists, starts that no client waits for stay away from a restore, which needs the driver's locks; for one second
/// at most.
pub(crate) struct HoldOff(Arc<Pool>);

impl Drop for HoldOff {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.restores -= 1;
        if state.restores == 0 {
            state.restores_since = None;
            self.0.changed.notify_all();
        }
    }
}

impl Pool {
    /// An empty pool.
    pub(crate) fn new(spawner: Spawner, spares: Spares, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self { spawner, spares, state: Mutex::default(), changed: Condvar::new(), metrics })
    }

    /// Starts the thread that fills it.
    pub(crate) fn keep_filled(self: &Arc<Self>) -> io::Result<()> {
        let pool = Arc::clone(self);
        thread("pool", move || pool.fill()).map(drop)
    }

    /// Why no worker of the usual kind becomes ready, and the message of the last one that did.
    pub(crate) fn health(&self) -> (Option<String>, Option<Attached>) {
        let mut state = lock(&self.state);
        let failure = state.usual().failure.as_ref().map(|it| it.error.to_string());
        let slow = || (state.slow > 0).then(|| format!("{} workers take long to start", state.slow));
        (failure.or_else(slow), state.seen.clone())
    }

    /// The GPUs that workers see, in their order. Waits until a worker has become ready; an error is the reason why none does.
    pub(crate) fn devices(&self) -> Result<Vec<Device>, PoolError> {
        self.seen().map(|it| it.devices)
    }

    /// The driver and its devices, as workers have found them. Waits as [`Pool::devices`].
    pub(crate) fn seen(&self) -> Result<Attached, PoolError> {
        let mut state = lock(&self.state);
        let asked = state.usual().begun;
        state.curious += 1;
        self.changed.notify_all();
        let (mut state, result) = self.wait_for(state, |state| {
            let seen = state.seen.clone().map(Ok);
            seen.or_else(|| state.usual().failed_since(asked).map(Err))
        });
        state.curious -= 1;
        self.changed.notify_all();
        result
    }

    /// A spare worker of the usual kind for a question; the worker stays in the pool and may be taken meanwhile.
    pub(crate) fn any(&self) -> Option<Arc<Worker>> {
        lock(&self.state).usual().ready.last().cloned()
    }

    /// The number of ready workers.
    pub(crate) fn spare(&self) -> usize {
        lock(&self.state).count(|it| it.ready.len())
    }

    /// The numbers of workers of the kinds of each class that the pool knows.
    pub(crate) fn counts(&self) -> BTreeMap<&'static str, Counts> {
        let mut state = lock(&self.state);
        state.usual();
        let targets = state.targets(&self.spares);
        let mut counts = BTreeMap::<_, Counts>::new();
        for (kind, workers) in &state.kinds {
            let counts = counts.entry(kind.class()).or_default();
            counts.ready += workers.ready.len();
            counts.starting += workers.starting;
            counts.kept += targets.get(kind).copied().unwrap_or(0);
            counts.waiting += workers.wanted;
        }
        counts
    }

    /// The kinds of workers that the pool knows, the usual one first.
    pub(crate) fn kinds(&self) -> Vec<WorkerKindInfo> {
        let mut state = lock(&self.state);
        state.usual();
        let targets = state.targets(&self.spares);
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let info = |(kind, workers): (&Kind, &Workers)| WorkerKindInfo {
            kind: kind.to_string(),
            ready: count(workers.ready.len()),
            starting: count(workers.starting),
            kept: count(targets.get(kind).copied().unwrap_or(0)),
            taken: count(workers.bursts.workers()),
            problem: workers.failure.as_ref().map(|it| it.error.to_string()),
        };
        state.kinds.iter().map(info).collect()
    }

    /// A worker for a client with these settings that sees these GPUs, or all. Waits until one is ready.
    pub(crate) fn take(&self, settings: &Settings, gpus: Option<&[Uuid]>) -> Result<Arc<Worker>, PoolError> {
        let kind = Kind::new(settings, gpus);
        let asked = Instant::now();
        lock(&self.state).kinds.entry(kind.clone()).or_default().bursts.count(asked);
        let class = kind.class();
        let (taken, waited) = self.take_kind(kind);
        let how = match &taken {
            Err(_) => Taken::Failed,
            Ok(_) if waited => Taken::Waited,
            Ok(_) => Taken::Ready,
        };
        self.metrics.worker_taken(class, how, asked.elapsed());
        taken
    }

    /// As [`Pool::take`], for a client that may come later: this says nothing about what clients will ask for.
    pub(crate) fn take_in_advance(&self, settings: &Settings, gpus: Option<&[Uuid]>) -> Result<Arc<Worker>, PoolError> {
        self.take_kind(Kind::new(settings, gpus)).0
    }

    /// Takes a worker of this kind. The flag says whether there was a wait for one.
    fn take_kind(&self, kind: Kind) -> (Result<Arc<Worker>, PoolError>, bool) {
        let mut state = lock(&self.state);
        let workers = state.kinds.entry(kind.clone()).or_default();
        let asked = workers.begun;
        workers.wanted += 1;
        self.changed.notify_all();
        let mut looks = 0;
        let (mut state, result) = self.wait_for(state, |state| {
            looks += 1;
            let workers = state.kinds.get_mut(&kind)?;
            while let Some(worker) = workers.ready.pop() {
                if !worker.is_dead() {
                    return Some(Ok(worker));
                }
            }
            // A start that failed earlier may succeed by now; a start that has failed since will not.
            workers.failed_since(asked).map(Err)
        });
        if let Some(workers) = state.kinds.get_mut(&kind) {
            workers.wanted -= 1;
        }
        self.changed.notify_all();
        (result, looks > 1)
    }

    /// Waits until there is a result, for longer than a start may take.
    fn wait_for<'a, T>(
        &self,
        mut state: MutexGuard<'a, State>,
        mut found: impl FnMut(&mut State) -> Option<Result<T, PoolError>>,
    ) -> (MutexGuard<'a, State>, Result<T, PoolError>) {
        let timeout = self.spawner.timeout() + TAKE_SLACK;
        let deadline = Instant::now() + timeout;
        loop {
            if state.closed {
                return (state, Err(PoolError::Closed));
            }
            if let Some(result) = found(&mut state) {
                return (state, result);
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return (state, Err(PoolError::Timeout(timeout)));
            };
            state = wait_timeout(&self.changed, state, left);
        }
    }

    /// Delays starts that no client waits for, while a restore begins.
    pub(crate) fn hold_off(self: &Arc<Self>) -> HoldOff {
        let mut state = lock(&self.state);
        state.restores += 1;
        state.restores_since.get_or_insert_with(Instant::now);
        HoldOff(Arc::clone(self))
    }

    /// Waits until no restore begins, but not longer than restores delay the starts of spare workers.
    pub(crate) fn wait_for_restores(&self) {
        let mut state = lock(&self.state);
        while let Some(since) = state.restores_since {
            let left = HOLD_OFF_MAX.saturating_sub(since.elapsed());
            if left.is_zero() || state.closed {
                return;
            }
            state = wait_timeout(&self.changed, state, left);
        }
    }

    /// Ends the spare workers, and makes no more.
    pub(crate) fn close(&self) {
        let ready: Vec<_> = {
            let mut state = lock(&self.state);
            state.closed = true;
            state.kinds.values_mut().flat_map(|it| std::mem::take(&mut it.ready)).collect()
        };
        self.changed.notify_all();
        for worker in ready {
            worker.kill();
        }
    }

    fn fill(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        while !state.closed {
            let now = Instant::now();
            let surplus = state.forget(&self.spares, now);
            if !surplus.is_empty() {
                drop(state);
                for worker in surplus {
                    debug!(worker = worker.pid(), "a spare worker ends: no client has asked for its kind lately");
                    worker.kill();
                }
                state = lock(&self.state);
                continue;
            }
            match state.next(&self.spares, now) {
                Next::Start(kind) => {
                    let workers = state.kinds.entry(kind.clone()).or_default();
                    workers.begun += 1;
                    workers.starting += 1;
                    let attempt = workers.begun;
                    drop(state);
                    self.start(kind, attempt);
                    state = lock(&self.state);
                }
                Next::At(Some(time)) => {
                    let left = time.saturating_duration_since(now).max(Duration::from_millis(1));
                    state = wait_timeout(&self.changed, state, left);
                }
                Next::At(None) => state = wait(&self.changed, state),
            }
        }
    }

    /// Starts a worker in a thread of its own.
    fn start(self: &Arc<Self>, kind: Kind, attempt: u64) {
        let (pool, of_thread) = (Arc::clone(self), kind.clone());
        let started = thread("pool-start", move || {
            let mut replaced = false;
            let began = Instant::now();
            let seen = lock(&pool.state).seen.as_ref().map(|it| it.devices.clone()).unwrap_or_default();
            let slow = || replaced = pool.replace_slow(&of_thread);
            let result = pool.spawner.spawn(of_thread.settings(), &seen, slow);
            pool.metrics.worker_started(of_thread.class(), result.is_ok().then(|| began.elapsed()));
            pool.started(&of_thread, attempt, replaced, result.map_err(|error| StartError::Spawn(Arc::new(error))));
        });
        if let Err(source) = started {
            let program = "a thread".into();
            self.started(&kind, attempt, false, Err(Arc::new(SpawnError::Start { program, source }).into()));
        }
    }

    /// Counts a start as slow. Returns whether another start takes its place.
    fn replace_slow(&self, kind: &Kind) -> bool {
        let mut state = lock(&self.state);
        if state.slow >= SLOW_MAX {
            return false;
        }
        state.slow += 1;
        if let Some(workers) = state.kinds.get_mut(kind) {
            workers.starting -= 1;
        }
        self.changed.notify_all();
        true
    }

    fn started(self: &Arc<Self>, kind: &Kind, attempt: u64, replaced: bool, result: Result<Arc<Worker>, StartError>) {
        if let Ok(worker) = &result {
            // Set before a client can take the worker, since the client replaces the action.
            let (pool, kind) = (Arc::downgrade(self), kind.clone());
            worker.on_death(move || {
                if let Some(pool) = pool.upgrade() {
                    pool.forget_dead(&kind);
                }
            });
        }
        let mut state = lock(&self.state);
        let closed = state.closed;
        if replaced {
            state.slow -= 1;
        }
        let workers = state.kinds.entry(kind.clone()).or_default();
        if !replaced {
            workers.starting -= 1;
        }
        // The kind may have been forgotten while its start was slow.
        workers.begun = workers.begun.max(attempt);
        match result {
            Ok(worker) if closed => worker.kill(),
            Ok(worker) => {
                if workers.failure.take().is_some() {
                    info!(%kind, "workers start again");
                }
                workers.failures = 0;
                workers.came_up = workers.came_up.max(attempt);
                workers.ready.push(Arc::clone(&worker));
                if kind.is_usual() {
                    state.seen = Some(worker.attached().clone());
                }
                drop(state);
                // The worker may have died before it was added to those that are ready.
                if worker.is_dead() {
                    self.forget_dead(kind);
                }
            }
            Err(error) => {
                // Logged in full once; the attempts that follow fail alike.
                if workers.failure.as_ref().is_none_or(|it| it.error.to_string() != error.to_string()) {
                    error!(%kind, "{error}");
                }
                // A start that fails after a later one has succeeded says nothing about the next.
                if attempt > workers.came_up {
                    workers.failed(attempt, error);
                }
            }
        }
        self.changed.notify_all();
    }

    /// A spare worker has died, which says nothing about the next.
    fn forget_dead(&self, kind: &Kind) {
        let mut state = lock(&self.state);
        let Some(workers) = state.kinds.get_mut(kind) else { return };
        let before = workers.ready.len();
        workers.ready.retain(|it| !it.is_dead());
        if workers.ready.len() != before {
            error!(%kind, "a spare worker has died; see its lines in this log");
            // The same as after a failure: workers that die at once must not be started in a circle.
            workers.failed(workers.begun, StartError::Died);
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const SPARES: Spares = Spares { usual: 1, learned: 1, remember: Duration::from_secs(60) };

    fn state(starting: usize, wanted: usize, curious: usize) -> State {
        let mut state = State { curious, ..State::default() };
        *state.usual() = Workers { starting, wanted, ..Workers::default() };
        state
    }

    fn of_gpu(gpu: u8) -> Kind {
        Kind::new(&Vec::new(), Some(&[[gpu; 16]]))
    }

    #[test]
    fn a_question_starts_a_worker_only_where_none_is_kept() {
        let starts = |starting, wanted, curious, usual| {
            let next = state(starting, wanted, curious).next(&Spares { usual, ..SPARES }, Instant::now());
            next == Next::Start(Kind::default())
        };
        assert!(starts(0, 0, 0, 1) && !starts(1, 0, 0, 1));
        assert!(!starts(1, 0, 3, 1));
        // If no spares are kept, a question starts one worker.
        assert!(!starts(0, 0, 0, 0) && starts(0, 0, 3, 0) && !starts(1, 0, 3, 0));
        assert!(starts(1, 1, 0, 1) && !starts(2, 1, 3, 1));
        assert!(!starts(STARTING_MAX, STARTING_MAX + 1, 0, 1));
    }

    #[test]
    fn a_restore_delays_spares_for_a_second_and_nobody_who_waits() {
        let now = Instant::now();
        let next_of = |wanted, at| {
            let mut state = state(0, wanted, 0);
            (state.restores, state.restores_since) = (1, Some(now));
            state.next(&SPARES, at)
        };
        assert_eq!(next_of(0, now), Next::At(Some(now + HOLD_OFF_MAX)));
        assert_eq!(next_of(0, now + HOLD_OFF_MAX), Next::Start(Kind::default()));
        assert_eq!(next_of(1, now), Next::Start(Kind::default()));
    }

    #[test]
    fn a_kind_that_was_taken_twice_is_kept_until_it_is_forgotten() {
        let now = Instant::now();
        let mut state = state(1, 0, 0);
        let take = |state: &mut State, at| state.kinds.entry(of_gpu(1)).or_default().bursts.count(at);
        take(&mut state, now);
        assert_eq!(state.next(&SPARES, now), Next::At(Some(now + SPARES.remember)));
        let again = now + 10 * SECOND;
        take(&mut state, again);
        assert_eq!(state.next(&SPARES, again), Next::Start(of_gpu(1)));
        state.forget(&SPARES, now + SPARES.remember + SECOND);
        assert_eq!(state.next(&SPARES, again + SECOND), Next::At(Some(again + SPARES.remember)));
        state.forget(&SPARES, again + SPARES.remember + SECOND);
        assert!(!state.kinds.contains_key(&of_gpu(1)));
        assert_eq!(state.next(&SPARES, again + 100 * SECOND), Next::At(None));
    }

    #[test]
    fn a_kind_that_fails_delays_itself_alone() {
        let mut state = state(1, 0, 0);
        let workers = state.kinds.entry(of_gpu(1)).or_default();
        workers.wanted = 1;
        workers.failed(1, StartError::Died);
        let now = Instant::now();
        let Next::At(Some(at)) = state.next(&SPARES, now) else { panic!("it starts at once") };
        assert!(at > now && at <= now + BACK_OFF && state.usual().failure.is_none());
        assert_eq!(state.next(&SPARES, at), Next::Start(of_gpu(1)));
        // The failure is known until its delay is over, although nobody asks for the kind any more.
        state.kinds.get_mut(&of_gpu(1)).unwrap().wanted = 0;
        state.forget(&SPARES, now);
        assert!(state.kinds.contains_key(&of_gpu(1)));
        state.forget(&SPARES, now + 2 * BACK_OFF_MAX);
        assert!(!state.kinds.contains_key(&of_gpu(1)));
    }

    #[test]
    fn only_so_many_kinds_are_remembered() {
        let now = Instant::now();
        let mut state = State::default();
        for gpu in 0..200 {
            state.kinds.entry(of_gpu(gpu)).or_default().bursts.count(now + u32::from(gpu) * SECOND);
        }
        state.forget(&SPARES, now);
        assert_eq!(state.kinds.len(), KINDS_MAX);
        assert!(state.kinds.contains_key(&of_gpu(199)) && !state.kinds.contains_key(&of_gpu(0)));
    }
}

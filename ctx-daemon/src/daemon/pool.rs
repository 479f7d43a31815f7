//! Workers that are ready before a client needs one: CUDA is initialised, and contexts are made.
//!
//! ```text
//!               want more                ready
//!   (nothing) ─────────────► starting ──────────► ready ──────────► taken, for one client, never to come back
//!        ▲                      │ failed            │ dies               take
//!        └── wait, longer ◄─────┘                   └──► (nothing)
//!            each time
//! ```
//!
//! A worker whose start takes long no longer counts as starting: the pool starts another in its place. The slow worker may
//! still become ready, and is killed when its time is up. Only a few may be so slow: if the driver hangs, more do not help.
//!
//! One thread keeps the pool filled. Each start of a worker has a thread of its own; there are more while a client waits.

use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rekindle_wire::attach::{Attached, Device, SETTINGS};
use rekindle_wire::control::{Failing, FailureKind};
use rekindle_wire::gpus;
use thiserror::Error;
use tracing::{error, info};

use super::grants::Uuid;
use super::spawn::{Settings, SpawnError, Spawner};
use super::worker::Worker;
use super::{lock, thread, wait, wait_timeout};

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

/// The driver shows a process these GPUs only, in this order, and numbers them anew.
const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// Why the pool has no worker.
#[derive(Clone, Debug, Error)]
pub(crate) enum PoolError {
    #[error("no worker: {0}")]
    Start(#[from] StartError),
    #[error("no worker: a thread of the daemon has ended unexpectedly; see its log")]
    Thread,
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
            Self::Start(_) | Self::Thread => FailureKind::Internal,
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
    spare: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    ready: Vec<Arc<Worker>>,
    starting: usize,
    /// The number of starts that take long, and were replaced.
    slow: usize,
    /// The message of the last worker that became ready.
    seen: Option<Attached>,
    wanted: usize,
    /// The number of callers that only want the message of the next worker that becomes ready.
    curious: usize,
    /// Counts attempts, so that a client that waits can tell whether a failed attempt began after the client asked.
    begun: u64,
    /// The latest attempt whose worker became ready.
    came_up: u64,
    failure: Option<Failure>,
    failures: u32,
    closed: bool,
}

struct Failure {
    attempt: u64,
    at: Instant,
    error: StartError,
}

impl State {
    /// When the next worker may be started; none if there are enough.
    fn next_start(&self, spare: usize) -> Option<Instant> {
        let enough = (spare + self.wanted).max(self.curious.min(1));
        if self.ready.len() + self.starting >= enough || self.starting >= STARTING_MAX {
            return None;
        }
        let Some(failure) = &self.failure else {
            return Some(Instant::now());
        };
        // After a failure there is one attempt at a time.
        if self.starting > 0 {
            return None;
        }
        let doubled = BACK_OFF.saturating_mul(1 << self.failures.saturating_sub(1).min(10));
        let back_off =
            if self.wanted + self.curious > 0 { doubled.min(BACK_OFF_WANTED) } else { doubled.min(BACK_OFF_MAX) };
        Some(failure.at + back_off)
    }
}

impl Pool {
    /// An empty pool.
    pub(crate) fn new(spawner: Spawner, spare: usize) -> Arc<Self> {
        Arc::new(Self { spawner, spare, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Starts the thread that fills it.
    pub(crate) fn keep_filled(self: &Arc<Self>) -> io::Result<()> {
        let pool = Arc::clone(self);
        thread("pool", move || pool.fill()).map(drop)
    }

    /// Why no worker becomes ready, and the message of the last one that did.
    pub(crate) fn health(&self) -> (Option<String>, Option<Attached>) {
        let state = lock(&self.state);
        let slow = || (state.slow > 0).then(|| format!("{} workers take long to start", state.slow));
        (state.failure.as_ref().map(|it| it.error.to_string()).or_else(slow), state.seen.clone())
    }

    /// The GPUs that workers see, in their order. Waits until a worker has become ready; an error is the reason why none does.
    pub(crate) fn devices(&self) -> Result<Vec<Device>, PoolError> {
        self.seen().map(|it| it.devices)
    }

    /// The driver and its devices, as workers have found them. Waits as [`Pool::devices`].
    pub(crate) fn seen(&self) -> Result<Attached, PoolError> {
        let timeout = self.spawner.timeout() + TAKE_SLACK;
        let deadline = Instant::now() + timeout;
        let mut state = lock(&self.state);
        let asked = state.begun;
        state.curious += 1;
        self.changed.notify_all();
        let result = loop {
            if let Some(seen) = &state.seen {
                break Ok(seen.clone());
            }
            if state.closed {
                break Err(PoolError::Closed);
            }
            if let Some(failure) = &state.failure
                && failure.attempt > asked
                && state.starting == 0
            {
                break Err(failure.error.clone().into());
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                break Err(PoolError::Timeout(timeout));
            };
            state = wait_timeout(&self.changed, state, left);
        };
        state.curious -= 1;
        self.changed.notify_all();
        result
    }

    /// A spare worker for a question; the worker stays in the pool and may be taken meanwhile.
    pub(crate) fn any(&self) -> Option<Arc<Worker>> {
        lock(&self.state).ready.last().cloned()
    }

    /// The number of ready workers.
    pub(crate) fn spare(&self) -> usize {
        lock(&self.state).ready.len()
    }

    /// A worker for a client with these settings that sees these GPUs, or all. Contexts depend on the settings that the driver
    /// reads, so for other settings than the usual ones a worker is started on demand.
    pub(crate) fn take(&self, settings: &Settings, gpus: Option<&[Uuid]>) -> Result<Arc<Worker>, PoolError> {
        let of_driver = |(name, _): &&(String, String)| SETTINGS.contains(&name.as_str());
        let mut settings: Settings = settings.iter().filter(of_driver).cloned().collect();
        if !settings.is_empty() || gpus.is_some() {
            let names = gpus.map(|uuids| uuids.iter().map(gpus::name).collect::<Vec<_>>().join(","));
            settings.extend(names.map(|names| (VISIBLE_DEVICES.to_owned(), names)));
            let spawned = self.spawner.spawn(&settings, || ());
            return spawned.map_err(|error| StartError::Spawn(Arc::new(error)).into());
        }
        let timeout = self.spawner.timeout() + TAKE_SLACK;
        let deadline = Instant::now() + timeout;
        let mut state = lock(&self.state);
        let asked = state.begun;
        state.wanted += 1;
        self.changed.notify_all();
        let result = loop {
            if state.closed {
                break Err(PoolError::Closed);
            }
            if let Some(worker) = state.ready.pop() {
                if worker.is_dead() {
                    continue;
                }
                break Ok(worker);
            }
            // A start that failed earlier may succeed by now; a start that has failed since will not.
            if let Some(failure) = &state.failure
                && failure.attempt > asked
                && state.starting == 0
            {
                break Err(failure.error.clone().into());
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                break Err(PoolError::Timeout(timeout));
            };
            state = wait_timeout(&self.changed, state, left);
        };
        state.wanted -= 1;
        self.changed.notify_all();
        result
    }

    /// Ends the spare workers, and makes no more.
    pub(crate) fn close(&self) {
        let ready = {
            let mut state = lock(&self.state);
            state.closed = true;
            std::mem::take(&mut state.ready)
        };
        self.changed.notify_all();
        for worker in ready {
            worker.kill();
        }
    }

    fn fill(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        while !state.closed {
            let Some(start) = state.next_start(self.spare) else {
                state = wait(&self.changed, state);
                continue;
            };
            if let Some(left) = start.checked_duration_since(Instant::now())
                && !left.is_zero()
            {
                state = wait_timeout(&self.changed, state, left);
                continue;
            }
            state.begun += 1;
            state.starting += 1;
            let attempt = state.begun;
            let pool = Arc::clone(self);
            drop(state);
            let started = thread("pool-start", move || {
                let mut replaced = false;
                let result = pool.spawner.spawn(&Vec::new(), || replaced = pool.replace_slow());
                pool.started(attempt, replaced, result.map_err(|error| StartError::Spawn(Arc::new(error))));
            });
            if let Err(source) = started {
                let program = "a thread".into();
                self.started(attempt, false, Err(Arc::new(SpawnError::Start { program, source }).into()));
            }
            state = lock(&self.state);
        }
    }

    /// Counts a start as slow. Returns whether another start takes its place.
    fn replace_slow(&self) -> bool {
        let mut state = lock(&self.state);
        if state.slow >= SLOW_MAX {
            return false;
        }
        state.slow += 1;
        state.starting -= 1;
        self.changed.notify_all();
        true
    }

    fn started(self: &Arc<Self>, attempt: u64, replaced: bool, result: Result<Arc<Worker>, StartError>) {
        if let Ok(worker) = &result {
            // Set before a client can take the worker, since the client replaces the action.
            let pool = Arc::downgrade(self);
            worker.on_death(move || {
                if let Some(pool) = pool.upgrade() {
                    pool.forget_dead();
                }
            });
        }
        let mut state = lock(&self.state);
        *(if replaced { &mut state.slow } else { &mut state.starting }) -= 1;
        match result {
            Ok(worker) if state.closed => worker.kill(),
            Ok(worker) => {
                if state.failure.take().is_some() {
                    info!("workers start again");
                }
                state.failures = 0;
                state.came_up = state.came_up.max(attempt);
                state.seen = Some(worker.attached().clone());
                state.ready.push(Arc::clone(&worker));
                drop(state);
                // The worker may have died before it was added to those that are ready.
                if worker.is_dead() {
                    self.forget_dead();
                }
            }
            Err(error) => {
                // Logged in full once; the attempts that follow fail alike.
                if state.failure.as_ref().is_none_or(|it| it.error.to_string() != error.to_string()) {
                    error!("{error}");
                }
                // A start that fails after a later one has succeeded says nothing about the next.
                if attempt > state.came_up {
                    state.failures = state.failures.saturating_add(1);
                    state.failure = Some(Failure { attempt, at: Instant::now(), error });
                }
            }
        }
        self.changed.notify_all();
    }

    /// A spare worker has died, which says nothing about the next.
    fn forget_dead(&self) {
        let mut state = lock(&self.state);
        let before = state.ready.len();
        state.ready.retain(|it| !it.is_dead());
        if state.ready.len() != before {
            error!("a spare worker has died; see its lines in this log");
            // The same as after a failure: workers that die at once must not be started in a circle.
            state.failures = state.failures.saturating_add(1);
            state.failure = Some(Failure { attempt: state.begun, at: Instant::now(), error: StartError::Died });
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_starts_a_worker_only_where_none_is_kept() {
        let starts = |starting, wanted, curious, spare| {
            State { starting, wanted, curious, ..State::default() }.next_start(spare).is_some()
        };
        assert!(starts(0, 0, 0, 1) && !starts(1, 0, 0, 1));
        assert!(!starts(1, 0, 3, 1));
        // If no spares are kept, a question starts one worker.
        assert!(!starts(0, 0, 0, 0) && starts(0, 0, 3, 0) && !starts(1, 0, 3, 0));
        assert!(starts(1, 1, 0, 1) && !starts(2, 1, 3, 1));
    }
}

//! The native processes of one dump: locked, checkpointed by the driver, and given back whatever happens.
//!
//! All processes are locked, in one order, before the first is checkpointed: a checkpoint of one would hang where another one of the
//! job still runs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rekindle_cuda_abi::checkpoint::ProcessState;
use rekindle_cuda_abi::types::CUDA_ERROR_NOT_READY;
use rekindle_wire::native::Call;
use tracing::{error, info, warn};

use super::super::lock;
use super::super::process::Process;
use super::driver::{Found, Limits, Native};
use super::error::NativeError;
use super::helper::HelperError;

/// The part of the lock's limit that the driver itself gets, in tenths: the rest is for its answer.
const FOR_DRIVER: u32 = 9;
/// How long CRIU may take to kill a process once its own end has closed its connection: it has killed it before, if at all.
const END: Duration = Duration::from_secs(1);
/// The pause between two looks whether a process runs again.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Locked processes. When this is dropped, those that live are given back.
pub(crate) struct Held {
    native: Arc<Native>,
    limits: Limits,
    processes: Mutex<Vec<Locked>>,
    /// Whether CRIU is about to kill the processes.
    end: AtomicBool,
}

/// A process that is locked, or may be.
#[derive(Clone)]
struct Locked {
    found: Found,
    /// Its state in the driver; none where the last call has failed.
    state: Option<ProcessState>,
}

impl Held {
    /// Locks processes. If one cannot be locked, those before it run on.
    pub(crate) fn lock(native: &Arc<Native>, found: Vec<Found>, limits: Limits) -> Result<Self, NativeError> {
        for one in &found {
            match native.state(one, limits.short)? {
                ProcessState::Running => {}
                state => return Err(NativeError::NotRunning { name: one.name.clone(), state: state.as_str() }),
            }
        }
        let held =
            Self { native: Arc::clone(native), limits, processes: Mutex::default(), end: AtomicBool::new(false) };
        for one in found {
            held.lock_one(one)?;
        }
        Ok(held)
    }

    fn lock_one(&self, one: Found) -> Result<(), NativeError> {
        let Limits { short, .. } = self.limits;
        // Before the call: whatever becomes of it, the process is looked after.
        self.native.keep_record(&one)?;
        let (process, name) = (one.process, one.name.clone());
        lock(&self.processes).push(Locked { found: one, state: None });
        let timeout = short.time / 10 * FOR_DRIVER;
        let timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX).max(1);
        match self.native.helper.call(process, Call::Lock { timeout_ms }, short) {
            Ok(_) => {
                self.is_now(process, Some(ProcessState::Locked));
                info!("{name}: locked");
                Ok(())
            }
            Err(HelperError::Refused { result: CUDA_ERROR_NOT_READY, .. } | HelperError::Overran { .. }) => {
                Err(NativeError::Busy { name, limit: short })
            }
            Err(source) => Err(NativeError::Call { name, source }),
        }
    }

    /// The processes, in the order in which they were locked.
    pub(crate) fn all(&self) -> Vec<Found> {
        lock(&self.processes).iter().map(|it| it.found.clone()).collect()
    }

    fn is_now(&self, process: Process, state: Option<ProcessState>) {
        if let Some(one) = lock(&self.processes).iter_mut().find(|it| it.found.process == process) {
            one.state = state;
        }
    }

    /// Notes that CRIU kills the processes next. If it does not, they are given back all the same.
    pub(crate) fn expect_end(&self) {
        self.end.store(true, Ordering::Relaxed);
    }

    fn find(&self, pid: i32) -> Option<Locked> {
        lock(&self.processes).iter().find(|it| it.found.process.pid == pid).cloned()
    }

    /// Has the driver move the GPU memory of a locked process into its host memory. The thread that works for the driver runs.
    pub(crate) fn checkpoint(&self, pid: i32) -> Result<(), NativeError> {
        let one = self.find(pid).ok_or(NativeError::NotHeld(pid))?.found;
        self.native.keep_record(&one)?;
        self.is_now(one.process, None);
        let done = self.native.helper.call(one.process, Call::Checkpoint, self.limits.long);
        done.map_err(|source| NativeError::Call { name: one.name.clone(), source })?;
        self.is_now(one.process, Some(ProcessState::Checkpointed));
        info!("{}: its GPU memory is in its host memory", one.name);
        Ok(())
    }

    /// Gives a process back. The thread that works for the driver runs.
    pub(crate) fn give_back(&self, pid: i32) -> Result<(), NativeError> {
        // It may have been given back before, when its dump failed.
        let Some(one) = self.find(pid) else { return Ok(()) };
        let given = self.native.give_back(&one.found, one.state, &[], self.limits);
        lock(&self.processes).retain(|it| it.found.process != one.found.process);
        given
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let left = std::mem::take(&mut *lock(&self.processes));
        for Locked { found: one, state } in left {
            if self.end.load(Ordering::Relaxed) {
                wait_for_end(one.process);
            }
            if !one.process.is_alive() {
                self.native.records.forget(one.process);
                continue;
            }
            warn!("{}: its dump is over, and the driver has not let it go: giving it back", one.name);
            if wait_until_it_runs(one.process, self.limits.long.time) {
                // An error has been logged, and nothing is left to do.
                let _ = self.native.give_back(&one, state, &[], self.limits);
            }
        }
    }
}

/// Waits for the end of a process that CRIU has killed, or has not, if something went wrong at last.
fn wait_for_end(process: Process) {
    let deadline = crate::limit::Limit::fixed(END).begins();
    while process.is_alive() && (process.is_ending() || !deadline.is_over()) {
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Waits until a process is not stopped: the driver needs a thread of it. Returns whether it runs.
pub(super) fn wait_until_it_runs(process: Process, time: Duration) -> bool {
    let deadline = crate::limit::Limit::fixed(time).begins();
    while process.is_alive() && process.is_stopped() {
        if deadline.is_over() {
            error!(
                pid = process.pid,
                "a locked process is stopped, so the driver cannot unlock it: let it go on (kill -CONT) and restart rekindled"
            );
            return false;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    process.is_alive()
}

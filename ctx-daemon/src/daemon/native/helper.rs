//! The helper that calls the driver's checkpoint: one process for all dumps and restores, started for the first call, and again
//! when it has ended.
//!
//! ```text
//!            asked               Ready               asked
//!   none ───────────► starting ────────► idle ◄──────────────► busy
//!    ▲                       │ Failed, or nothing said           │ takes longer than the limit, or ends
//!    └───────────────────────┴──────────────────────────────────┘
//! ```
//!
//! A call that takes longer than its limit may never end. Its helper is killed, and the caller finds out with a new helper in what
//! state the driver has left the process.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use rekindle_cuda_abi::types::{CUDA_SUCCESS, result_name};
use rekindle_wire::control::{Failing, FailureKind};
use rekindle_wire::frame::{self, FrameError};
use rekindle_wire::native::{About, Answer, Call, Question, Ready};
use thiserror::Error;
use tracing::{info, warn};

use super::super::process::Process;
use super::super::spawn::become_helper;
use super::super::{lock, wait_timeout};
use crate::config::Config;
use crate::limit::{Deadline, Limit};

/// Variables that would have the helper see other GPUs than the machine has.
const UNSEEN: [&str; 2] = ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"];

/// Why a call has no result.
#[derive(Clone, Debug, Error)]
pub(crate) enum HelperError {
    #[error("the driver's checkpoint cannot be used: {0}")]
    Unusable(String),
    #[error("the helper that calls the driver was still busy with another process after {0}")]
    Busy(Limit),
    #[error("the driver was to {call} and had not done so after {limit}")]
    Overran { call: &'static str, limit: Limit },
    #[error("the helper that calls the driver has ended while the driver was to {0}")]
    Ended(&'static str),
    #[error("the driver was to {call} and answers {} ({result})", result_name(*.result))]
    Refused { call: &'static str, result: i32 },
    #[error("it has ended")]
    Gone,
}

impl Failing for HelperError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Unusable(_) | Self::Refused { .. } => FailureKind::Refused,
            Self::Busy(_) | Self::Overran { .. } => FailureKind::Timeout,
            Self::Ended(_) | Self::Gone => FailureKind::LostPeer,
        }
    }
}

/// The helper, when there is one.
pub(crate) struct DriverHelper {
    program: io::Result<PathBuf>,
    library: PathBuf,
    start_timeout: Limit,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    helper: Option<Helper>,
    /// A thread has the helper, or starts one.
    busy: bool,
    /// The helper's process, also while a thread has it.
    process: Option<Process>,
}

struct Helper {
    child: Child,
    channel: UnixStream,
    about: About,
}

impl DriverHelper {
    /// A helper for the configured driver library, not started yet.
    pub(super) fn new(config: &Config) -> Self {
        Self {
            program: std::env::current_exe(),
            library: config.workers.cuda_driver.clone(),
            start_timeout: Limit::configured(config.workers.start_timeout, "pool.start_timeout_ms"),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// What the driver is.
    pub(crate) fn about(&self, limit: Limit) -> Result<About, HelperError> {
        let helper = self.take(limit.begins())?;
        let about = helper.about.clone();
        self.give(Some(helper));
        Ok(about)
    }

    /// The process of the helper, for records.
    pub(super) fn process(&self) -> Option<Process> {
        lock(&self.state).process
    }

    /// Calls the driver about a process. The limit counts from when the helper is free.
    pub(crate) fn call(&self, process: Process, call: Call, limit: Limit) -> Result<i32, HelperError> {
        let helper = self.take(limit.begins())?;
        // The driver takes a number for a process's whatever it is now.
        if !process.is_alive() || !process.is_leader() {
            self.give(Some(helper));
            return Err(HelperError::Gone);
        }
        let what = call.as_str();
        let began = Instant::now();
        let answered = helper.ask(&Question { pid: process.pid, call }, limit.begins());
        let ms = began.elapsed().as_millis() as u64;
        match answered {
            Ok(Answer { result: CUDA_SUCCESS, value }) => {
                self.give(Some(helper));
                tracing::debug!(pid = process.pid, ms, "the driver was to {what}: done");
                Ok(value)
            }
            Ok(Answer { result, .. }) => {
                self.give(Some(helper));
                tracing::debug!(pid = process.pid, ms, result, "the driver was to {what}: {}", result_name(result));
                Err(HelperError::Refused { call: what, result })
            }
            Err(error) => {
                let hangs = matches!(&error, FrameError::Io(e) if e.kind() == io::ErrorKind::WouldBlock);
                let error = if hangs { HelperError::Overran { call: what, limit } } else { HelperError::Ended(what) };
                warn!(pid = process.pid, helper = helper.child.id(), ms, "{error}");
                helper.end();
                self.give(None);
                Err(error)
            }
        }
    }

    /// Waits until the helper is free, and starts it if there is none.
    fn take(&self, deadline: Deadline) -> Result<Helper, HelperError> {
        let mut state = lock(&self.state);
        while state.busy {
            if deadline.is_over() {
                return Err(HelperError::Busy(deadline.limit));
            }
            state = wait_timeout(&self.changed, state, deadline.left());
        }
        state.busy = true;
        let idle = state.helper.take();
        drop(state);
        match idle.filter(Helper::lives) {
            Some(helper) => Ok(helper),
            None => self.start().inspect_err(|error| {
                warn!("{error}");
                self.give(None);
            }),
        }
    }

    fn give(&self, helper: Option<Helper>) {
        let mut state = lock(&self.state);
        let process = helper.as_ref().and(state.process);
        *state = State { helper, busy: false, process };
        drop(state);
        self.changed.notify_all();
    }

    fn start(&self) -> Result<Helper, HelperError> {
        let unusable = |error: &dyn std::fmt::Display| HelperError::Unusable(error.to_string());
        let program = self.program.as_ref().map_err(|error| unusable(error))?;
        let (channel, theirs) = UnixStream::pair().map_err(|error| unusable(&error))?;
        let fd = theirs.as_raw_fd();
        let mut command = Command::new(program);
        command.args(["native", "--channel-fd", &fd.to_string(), "--library"]).arg(&self.library);
        command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null());
        UNSEEN.iter().for_each(|name| {
            command.env_remove(name);
        });
        become_helper(&mut command, fd);
        let mut child = command.spawn().map_err(|error| unusable(&error))?;
        drop(OwnedFd::from(theirs));
        lock(&self.state).process = Process::with_pid(child.id() as i32).ok();
        let began = Instant::now();
        let ready = channel.set_read_timeout(Some(self.start_timeout.time)).map_err(FrameError::from);
        let about = match ready.and_then(|()| frame::receive::<Ready>(&channel)).map(|it| it.body) {
            Ok(Ready::Ready(about)) => Ok(about),
            Ok(Ready::Failed { reason }) => Err(HelperError::Unusable(reason)),
            Err(FrameError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(HelperError::Unusable(format!("the driver was not initialised after {}", self.start_timeout)))
            }
            Err(error) => Err(unusable(&error)),
        };
        match about {
            Ok(about) => {
                let ms = began.elapsed().as_millis() as u64;
                info!(helper = child.id(), ms, version = about.version, "the driver's checkpoint can be called");
                Ok(Helper { child, channel, about })
            }
            Err(error) => {
                let _ = child.kill();
                reap(child);
                Err(error)
            }
        }
    }
}

impl Helper {
    /// Whether the helper has not ended since its last call.
    fn lives(&self) -> bool {
        Process::with_pid(self.child.id() as i32).is_ok_and(|it| it.is_alive())
    }

    fn ask(&self, question: &Question, deadline: Deadline) -> Result<Answer, FrameError> {
        // A timeout of zero would be none.
        self.channel.set_read_timeout(Some(deadline.left().max(Duration::from_millis(1))))?;
        frame::send(&self.channel, question, &[], &[])?;
        Ok(frame::receive::<Answer>(&self.channel)?.body)
    }

    /// Kills the helper.
    fn end(mut self) {
        let _ = self.child.kill();
        reap(self.child);
    }
}

/// Waits for the end of a helper that was killed. One that cannot die, because a driver hangs, delays no thread.
fn reap(mut child: Child) {
    std::thread::spawn(move || child.wait());
}

//! Native processes: those of the tree that use NVIDIA's own driver library. The daemon has the driver checkpoint them, while a
//! thread of each runs that the plugin lets run.

use rekindle_wire::control::{NativeThread, Reply, Request};
use thiserror::Error;

use crate::alarm::SuspendedAlarm;
use crate::daemon::{self, Daemon, DaemonError};
use crate::log;
use crate::thread::{RunningThread, ThreadError};

/// Why a native process is not checkpointed, or does not get its GPU memory back.
#[derive(Debug, Error)]
pub enum NativeError {
    /// The daemon, or the driver, does not do it.
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    /// The thread does not run, or does not stop.
    #[error(transparent)]
    Thread(#[from] ThreadError),
}

/// The native processes of a dump that are locked, or checkpointed.
#[derive(Debug, Default)]
pub struct Natives(Vec<NativeThread>);

impl Natives {
    /// These, which the daemon has locked.
    pub fn new(locked: Vec<NativeThread>) -> Self {
        Self(locked)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Their pids.
    pub fn pids(&self) -> Vec<i32> {
        self.0.iter().map(|it| it.pid).collect()
    }

    /// Whether the process is one of them.
    pub fn has(&self, pid: i32) -> bool {
        self.0.iter().any(|it| it.pid == pid)
    }

    /// Has the GPU memory of a process, which is stopped, moved into its host memory. Does nothing for other processes.
    pub fn checkpoint(&self, daemon: &Daemon, pid: i32) -> Result<(), NativeError> {
        match self.0.iter().find(|it| it.pid == pid) {
            Some(native) => ask(daemon, *native, &Request::NativeCheckpoint { pid }).map(drop),
            None => Ok(()),
        }
    }

    /// Gives all of them back, whether they are checkpointed or only locked, before they run on. An error is logged, and the last
    /// one returned: the daemon has killed that process, or does all it can when the connection closes.
    pub fn give_back(&mut self, daemon: &Daemon) -> Result<(), NativeError> {
        let _alarm = SuspendedAlarm::new();
        let mut result = Ok(());
        for native in std::mem::take(&mut self.0) {
            let given = ask(daemon, native, &Request::NativeResume { pid: native.pid });
            if let Err(error) = given {
                log::error(&format!("process {} does not get its GPU memory back: {error}", native.pid));
                result = Err(error);
            }
        }
        result
    }
}

/// Has the daemon do something about a process while its thread runs. Returns whether that was the last step of a restore.
pub fn ask(daemon: &Daemon, native: NativeThread, request: &Request) -> Result<bool, NativeError> {
    let running = RunningThread::let_run(native.tid)?;
    let reply = daemon.ask(request);
    let stopped = running.stop();
    match reply? {
        Reply::NativeDone { open } => {
            stopped?;
            Ok(open)
        }
        other => Err(daemon::unexpected(other).into()),
    }
}

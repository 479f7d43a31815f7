//! Processes that have lost their worker, and their GPU state with it. They go on, and get an error from every CUDA call; a
//! dump of them would have no GPU state.

use std::sync::Mutex;

use super::clients::Client;
use super::process::{self, Process};
use super::{lock, mappings};

/// A process whose loss the daemon has seen.
#[derive(Clone, Debug)]
pub(crate) struct Lost {
    pub(crate) process: Process,
    pub(crate) command: String,
    /// The worker that the process had.
    pub(crate) worker: i32,
    /// How the worker ended.
    pub(crate) reason: String,
}

impl Lost {
    fn is_current(&self) -> bool {
        // A process that has executed another program needs no worker any more.
        self.process.is_alive() && mappings::has_ring(self.process.pid)
    }
}

/// All losses that the daemon knows of.
#[derive(Default)]
pub(crate) struct LostWorkers(Mutex<Vec<Lost>>);

impl LostWorkers {
    /// Notes a process whose worker has died. Returns whether the process is a loss: it may be gone itself.
    pub(crate) fn note(&self, client: &Client, reason: String) -> bool {
        let lost = Lost {
            process: client.process,
            command: client.attach.command.clone(),
            worker: client.worker.pid(),
            reason,
        };
        let current = lost.is_current();
        if current {
            lock(&self.0).push(lost);
        }
        current
    }

    /// A process has its worker after all.
    pub(crate) fn found(&self, process: Process) {
        lock(&self.0).retain(|it| it.process != process);
    }

    /// The lost processes that still exist.
    pub(crate) fn all(&self) -> Vec<Lost> {
        let mut known = lock(&self.0).clone();
        known.retain(Lost::is_current);
        // A process that was added meanwhile stays for the next time.
        lock(&self.0).retain(|it| known.iter().any(|k| k.process == it.process) || it.is_current());
        known
    }

    /// Why a process of this tree has no worker although it had one; the first such process. Processes that this daemon has
    /// never known are reported only where the tree has nothing else of ours: they may be another daemon's.
    pub(crate) fn in_tree(&self, tree: &[i32], ours: bool) -> Option<String> {
        let known = self.all().into_iter().map(|it| it.process.pid).find(|pid| tree.contains(pid));
        let unknown = || tree.iter().copied().find(|pid| !ours && mappings::has_ring(*pid));
        known.or_else(unknown).map(|pid| self.why(pid))
    }

    /// The message for a process that has a ring and no worker.
    pub(crate) fn why(&self, pid: i32) -> String {
        let name = process::command(pid);
        match self.all().into_iter().find(|it| it.process.pid == pid) {
            Some(lost) => format!(
                "process {pid} ({name}) has lost its worker ({}), and its GPU state with it: restart it",
                lost.reason
            ),
            None => format!(
                "process {pid} ({name}) has a worker that this daemon does not know: the worker has died, or joins in a moment; if it does not join, restart the process"
            ),
        }
    }
}

//! Processes that have lost their worker, and their GPU state with it. They go on, and get an error from every CUDA call;
//! a dump of them would be of nothing.

use std::sync::Mutex;

use super::clients::Client;
use super::process::{self, Process};
use super::{lock, mappings};

/// A process whose loss the daemon has seen.
#[derive(Clone, Debug)]
pub(crate) struct Lost {
    pub(crate) process: Process,
    pub(crate) command: String,
    /// The worker that it had.
    pub(crate) worker: i32,
    /// How that ended.
    pub(crate) reason: String,
}

impl Lost {
    fn is_current(&self) -> bool {
        // A process that has executed another program needs no worker any more.
        self.process.is_alive() && mappings::has_ring(self.process.pid)
    }
}

/// All that the daemon knows of.
#[derive(Default)]
pub(crate) struct LostWorkers(Mutex<Vec<Lost>>);

impl LostWorkers {
    /// The worker of this client has died. Whether that is because the client is gone, this finds out.
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

    /// The processes that are still there.
    pub(crate) fn all(&self) -> Vec<Lost> {
        let mut known = lock(&self.0).clone();
        known.retain(Lost::is_current);
        // One that came meanwhile stays for the next time.
        lock(&self.0).retain(|it| known.iter().any(|k| k.process == it.process) || it.is_current());
        known
    }

    /// Why a process of this tree has no worker although it had one; the first that is found. Of processes that this
    /// daemon has never known it speaks only where there is nothing else of ours: they may be another daemon's.
    pub(crate) fn in_tree(&self, tree: &[i32], ours: bool) -> Option<String> {
        let known = self.all().into_iter().map(|it| it.process.pid).find(|pid| tree.contains(pid));
        let unknown = || tree.iter().copied().find(|pid| !ours && mappings::has_ring(*pid));
        known.or_else(unknown).map(|pid| self.why(pid))
    }

    /// Says of a process with a ring that it has no worker.
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

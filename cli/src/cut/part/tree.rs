//! A process tree that stands still or ends.

use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use super::super::manifest::Dumped;
use super::super::talk::Seen;
use super::seen;
use crate::failure::Failure;
use crate::network::connection::Connection;
use crate::network::sockets;
use crate::process::{self, Process};

/// How long killed processes may take to end.
const END: Duration = Duration::from_secs(10);
/// The pause between two looks whether CRIU has let go of a tree, which stands still meanwhile.
const NOTICE: Duration = Duration::from_micros(500);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The processes of a tree. A later process with the same number is none of them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Tree {
    processes: Vec<Dumped>,
    /// Those that somebody had stopped.
    stopped: Vec<i32>,
    /// Their connections that had no SO_REUSEADDR, by the socket's inode.
    exclusive: BTreeSet<u64>,
}

impl Tree {
    /// The process with this number, and all that descend from it.
    pub(super) fn of(root: i32) -> Result<Self, Failure> {
        let pids = Process::trees_of(&[root]).context("cannot list processes")?;
        let dumped = |pid| Some(Dumped { pid, start: process::start_of(pid)? });
        Ok(Self { processes: pids.into_iter().filter_map(dumped).collect(), ..Self::default() })
    }

    /// Those of these processes that a dump has named.
    pub(super) fn of_dumped(processes: &[Dumped]) -> Self {
        Self { processes: processes.to_vec(), ..Self::default() }
    }

    /// Notes which of its processes somebody has stopped.
    pub(super) fn noting_stopped(mut self) -> Self {
        // A debugger's hold is none, nor that of another CRIU.
        let is_stopped = |pid: &i32| Process::find(*pid).is_some_and(|it| it.is_stopped()) && !process::is_traced(*pid);
        self.stopped = self.pids().into_iter().filter(is_stopped).collect();
        self
    }

    /// Notes what its connections are like before CRIU dumps them.
    pub(super) fn noting_connections(mut self) -> Self {
        self.exclusive = sockets::exclusive(&self.pids());
        self
    }

    /// The same tree as one in which these are stopped.
    pub(super) fn with_stopped(self, stopped: &[i32]) -> Self {
        Self { stopped: stopped.to_vec(), ..self }
    }

    pub(super) fn stopped(&self) -> &[i32] {
        &self.stopped
    }

    /// The same tree, which has grown since something was noted of it.
    pub(super) fn now(&self, root: i32) -> Result<Self, Failure> {
        Ok(Self { processes: Self::of(root)?.processes, ..self.clone() })
    }

    pub(super) fn processes(&self) -> &[Dumped] {
        &self.processes
    }

    pub(super) fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|it| it.pid).collect()
    }

    /// Stops it. What CRIU holds stands still when CRIU lets go of it.
    pub(super) fn stop(&self) {
        self.signal(Signal::STOP, |_| true);
    }

    /// Undoes that.
    pub(super) fn go_on(&self) {
        self.signal(Signal::CONT, |pid| !self.stopped.contains(&pid));
    }

    /// Undoes that as soon as CRIU has let go of it, or has died: then its sockets are mended first.
    pub(super) fn goes_on_when_left(&self) {
        while self.processes.iter().any(|it| is_same(it) && process::is_traced(it.pid)) {
            std::thread::sleep(NOTICE);
        }
        self.unmute();
        self.go_on();
    }

    /// Takes its connections out of repair mode if a CRIU has left them in it that was killed.
    pub(super) fn unmute(&self) {
        sockets::unmute(&self.pids(), &self.exclusive);
    }

    /// Kills it. Its connections end as those of any process that is killed.
    pub(super) fn kill(&self) {
        self.signal(Signal::KILL, |_| true);
    }

    /// Kills it, without a word to those to whom its connections lead. Waits until all its processes have ended.
    pub(super) fn end(&self) -> Result<(), Failure> {
        self.stop();
        sockets::mute(&self.pids());
        self.kill();
        let began = Instant::now();
        while self.is_alive() {
            if began.elapsed() > END {
                return Err(anyhow!("processes do not end that were killed: {:?}", self.pids()).into());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// The same for a tree that runs, with all that descend from its processes by now.
    pub(super) fn end_all(mut self) -> Result<(), Failure> {
        loop {
            // What is stopped makes no more processes.
            self.stop();
            let alive: Vec<_> = self.processes.iter().filter(|it| is_same(it)).map(|it| it.pid).collect();
            let all = Process::trees_of(&alive).context("cannot list processes")?;
            let known = self.pids();
            let dumped = |pid| Some(Dumped { pid, start: process::start_of(pid)? });
            let more: Vec<_> = all.into_iter().filter(|it| !known.contains(it)).filter_map(dumped).collect();
            if more.is_empty() {
                return self.end();
            }
            self.processes.extend(more);
        }
    }

    /// Whether one of its processes lives.
    pub(super) fn is_alive(&self) -> bool {
        self.processes.iter().any(is_same)
    }

    /// Its TCP connections.
    pub(super) fn connections(&self) -> Result<Vec<Connection>, Failure> {
        sockets::connections(&self.pids())
    }

    /// Its TCP connections, and those that may have been.
    pub(super) fn seen(&self) -> Result<Seen, Failure> {
        let network = format!("{} {}", process::boot(), seen::network()?);
        Ok(Seen { network, ..seen::seen(&self.pids())? })
    }

    fn signal(&self, signal: Signal, filter: impl Fn(i32) -> bool) {
        for it in self.processes.iter().filter(|it| filter(it.pid) && is_same(it)) {
            // It may have ended meanwhile.
            let _ = Pid::from_raw(it.pid).map(|pid| kill_process(pid, signal));
        }
    }
}

fn is_same(process: &Dumped) -> bool {
    process::start_of(process.pid) == Some(process.start)
}

/// The right to stop a tree and to let it go on, which one process has at a time, and who inherits it.
#[derive(Debug)]
pub(super) struct Held(File);

impl Held {
    /// Takes it for the tree with this root.
    pub(super) fn take(root: i32) -> Result<Self, Failure> {
        // The process's directory: a later process with the same number has another one, and no file is left.
        let path = format!("/proc/{root}");
        let file = File::open(&path).map_err(|_| Failure::refused(anyhow!("there is no process {root}")))?;
        match file.try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(TryLockError::WouldBlock) => Err(Failure::refused(anyhow!(
                "another cut of the tree of {root} is being made, or has not let go of it yet: try again"
            ))),
            Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {path}"))?,
        }
    }

    /// The same right. It ends with the last one who has it.
    pub(super) fn shared(&self) -> Result<File, Failure> {
        Ok(self.0.try_clone().context("cannot duplicate a descriptor")?)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_tree_stands_still_goes_on_and_ends() {
        let mut child = Command::new("sh").args(["-c", "sleep 1000 & wait"]).spawn().unwrap();
        let root = child.id() as i32;
        let tree = loop {
            let tree = Tree::of(root).unwrap();
            if tree.processes.len() == 2 {
                break tree;
            }
        };
        let wait = |stopped: bool| {
            while tree.pids().iter().any(|it| Process::find(*it).unwrap().is_stopped() != stopped) {
                std::thread::sleep(POLL_INTERVAL);
            }
        };
        tree.stop();
        wait(true);
        let noted = tree.clone().noting_stopped();
        noted.go_on();
        assert!(Process::find(root).unwrap().is_stopped(), "somebody had stopped it");
        tree.go_on();
        wait(false);
        let other = Tree::of_dumped(&[Dumped { pid: root, start: 1 }]);
        other.kill();
        assert!(!other.is_alive() && tree.is_alive());
        tree.end().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_tree_ends_with_those_of_its_processes_that_were_not_known() {
        let mut child = Command::new("sh").args(["-c", "sleep 1000 & wait"]).spawn().unwrap();
        let root = child.id() as i32;
        let all = loop {
            let all = Tree::of(root).unwrap();
            if all.processes.len() == 2 {
                break all;
            }
        };
        let known: Vec<_> = all.processes.iter().copied().filter(|it| it.pid == root).collect();
        Tree::of_dumped(&known).end_all().unwrap();
        child.wait().unwrap();
        assert!(!all.is_alive());
    }

    #[test]
    fn one_cut_at_a_time_has_a_tree() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let root = child.id() as i32;
        let held = Held::take(root).unwrap();
        let refused = || Held::take(root).unwrap_err().to_string();
        assert!(refused().contains("another cut"), "{}", refused());
        let shared = held.shared().unwrap();
        drop(held);
        assert!(refused().contains("another cut"));
        drop(shared);
        Held::take(root).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(refused().contains("no process"));
    }
}

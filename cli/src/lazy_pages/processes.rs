//! The restored processes that a guard guards.

use std::os::fd::OwnedFd;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use crate::process::Process;

/// How often the guard looks for processes that have been made since it looked last.
const LOOKS: u32 = 100;
const BETWEEN_LOOKS: Duration = Duration::from_millis(1);
/// How long processes may take to end when they are killed. In the driver or on a dead file system it takes forever.
const DYING: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// The processes of a tree, as it was when CRIU had made them.
pub(super) struct Processes(Vec<(i32, OwnedFd)>);

impl Processes {
    /// The processes of a tree that does not run yet.
    pub(super) fn of_tree(root: i32) -> anyhow::Result<Self> {
        let tree = Process::trees_of(&[root]).context("cannot list the processes")?;
        if tree.is_empty() {
            bail!("there is no process {root}");
        }
        let open = |pid: i32| {
            let fd = pidfd_open(Pid::from_raw(pid).context("no process id")?, PidfdFlags::empty());
            Ok((pid, fd.with_context(|| format!("cannot watch process {pid}"))?))
        };
        Ok(Self(tree.into_iter().map(open).collect::<anyhow::Result<_>>()?))
    }

    /// Kills the processes and all that they have made since, and waits until they are dead. Returns which those are, in words.
    pub(super) fn kill(&self) -> String {
        // Stopped processes make no others. One that waits for a page, or for the server to hear of its new child, makes none either.
        let mut known = self.alive();
        for _ in 0..LOOKS {
            known.iter().for_each(|pid| signal(*pid, Signal::STOP));
            match Process::trees_of(&known) {
                Ok(found) if found.iter().any(|it| !known.contains(it)) => known = found,
                _ => break,
            }
            thread::sleep(BETWEEN_LOOKS);
        }
        for (_, fd) in &self.0 {
            let _ = pidfd_send_signal(fd, Signal::KILL);
        }
        known.iter().for_each(|pid| signal(*pid, Signal::KILL));
        for (_, fd) in &self.0 {
            let _ = poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&DYING));
        }
        let pids: Vec<_> = known.iter().map(ToString::to_string).collect();
        if pids.is_empty() { "they had ended".to_owned() } else { format!("pid {}", pids.join(", ")) }
    }

    /// The pids of those that have not ended: no other processes have these numbers.
    fn alive(&self) -> Vec<i32> {
        let lives = |fd: &OwnedFd| {
            poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&Timespec::default())).is_ok_and(|ready| ready == 0)
        };
        self.0.iter().filter(|(_, fd)| lives(fd)).map(|(pid, _)| *pid).collect()
    }
}

fn signal(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        // A process that has ended meanwhile needs no signal.
        let _ = kill_process(pid, signal);
    }
}

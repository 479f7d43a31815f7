//! The restored processes that a guard guards.

use std::os::fd::OwnedFd;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::process::Process;

/// How often the guard looks for processes that have been made since it looked last.
const LOOKS: u32 = 100;
const BETWEEN_LOOKS: Duration = Duration::from_millis(1);

/// The processes of a tree, as it was at a moment.
pub(crate) struct Processes(Vec<(i32, OwnedFd)>);

impl Processes {
    /// The processes of a tree now.
    pub(crate) fn of_tree(root: i32) -> anyhow::Result<Self> {
        let tree = Process::trees_of(&[root]).context("cannot list the processes")?;
        if tree.is_empty() {
            bail!("there is no process {root}");
        }
        Ok(Self(tree.into_iter().map(|pid| Ok((pid, pidfd(pid)?))).collect::<anyhow::Result<_>>()?))
    }

    /// Kills the processes and all that they have made since. Returns which those are, in words.
    pub(crate) fn kill(&self) -> String {
        // Stopped processes make no others. One that waits for a page, or for the server to hear of its new child, makes none either.
        let mut known: Vec<(i32, OwnedFd)> = Vec::new();
        for _ in 0..LOOKS {
            let found = Process::trees_of(&self.alive()).unwrap_or_default();
            let new: Vec<i32> = found.into_iter().filter(|pid| !known.iter().any(|it| it.0 == *pid)).collect();
            if new.is_empty() {
                break;
            }
            for pid in new {
                // One that has ended meanwhile needs no signal.
                if let Ok(fd) = pidfd(pid) {
                    let _ = pidfd_send_signal(&fd, Signal::STOP);
                    known.push((pid, fd));
                }
            }
            thread::sleep(BETWEEN_LOOKS);
        }
        for (_, fd) in known.iter().chain(&self.0) {
            let _ = pidfd_send_signal(fd, Signal::KILL);
        }
        let pids: Vec<_> = known.iter().map(|(pid, _)| pid.to_string()).collect();
        if pids.is_empty() { "they had ended".to_owned() } else { format!("pid {}", pids.join(", ")) }
    }

    /// The pids of those that have not ended: no other processes have these numbers.
    fn alive(&self) -> Vec<i32> {
        // A process whose first thread has ended, and others not, is alive to this.
        let lives = |fd: &OwnedFd| {
            poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&Timespec::default())).is_ok_and(|ready| ready == 0)
        };
        self.0.iter().filter(|(_, fd)| lives(fd)).map(|(pid, _)| *pid).collect()
    }
}

fn pidfd(pid: i32) -> anyhow::Result<OwnedFd> {
    let fd = pidfd_open(Pid::from_raw(pid).context("no process id")?, PidfdFlags::empty());
    fd.with_context(|| format!("cannot watch process {pid}"))
}

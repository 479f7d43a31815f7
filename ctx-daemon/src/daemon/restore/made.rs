//! The processes that CRIU has made, to be ended with a restore that is given up.
//!
//! A CRIU that is killed leaves them behind: stopped for ever, or, when only our part was missing, running without a
//! worker. Which they are shows by the connections that they make on the way, and by who is above them: what is below CRIU,
//! or, after its death, below one that was above it, is its work up to there.

use std::os::fd::AsFd;
use std::sync::Mutex;

use tracing::{debug, warn};

use super::super::process::{self, Process};
use super::super::{lock, sys};

/// What is known of them.
pub(super) struct Made {
    /// CRIU and all above it.
    makers: Vec<i32>,
    roots: Mutex<Vec<Process>>,
}

impl Made {
    /// By this CRIU, which is there.
    pub(super) fn by(criu: i32) -> Self {
        Self { makers: process::ancestry(criu), roots: Mutex::default() }
    }

    /// This is one of them.
    pub(super) fn note(&self, process: Process) {
        let above = process::ancestry(process.pid);
        let made = above.into_iter().take_while(|pid| *pid > 1 && !self.makers.contains(pid));
        // None where CRIU itself, or whoever plays it, has connected.
        let Some(root) = made.last().and_then(|pid| Process::with_pid(pid).ok()) else {
            return;
        };
        let mut roots = lock(&self.roots);
        if !roots.contains(&root) {
            roots.push(root);
        }
    }

    /// Ends those that are known of, and all below them.
    pub(super) fn kill(&self) {
        for root in lock(&self.roots).iter().filter(|it| it.is_alive()) {
            warn!(root = root.pid, "killing the processes of a restore that was given up");
            for pid in process::tree(root.pid).unwrap_or_default() {
                let killed = sys::pidfd_open(pid).and_then(|it| sys::pidfd_kill(it.as_fd()));
                if let Err(error) = killed {
                    debug!(pid, %error, "cannot kill it; it has ended already");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};

    #[test]
    fn all_below_the_maker_is_killed_and_nothing_else() {
        let own = std::process::id() as i32;
        let made = Made::by(own);
        // The maker itself, and what is above it, are never taken for its work.
        made.note(Process::with_pid(own).unwrap());
        made.kill();
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        let mut root =
            Command::new("sh").args(["-c", "sleep 60 & echo $!; wait"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut said = std::io::BufReader::new(root.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut said, &mut line).unwrap();
        let below = Process::with_pid(line.trim().parse().unwrap()).unwrap();
        made.note(below);
        made.kill();
        assert_eq!(root.wait().unwrap().signal(), Some(libc::SIGKILL));
        let begun = std::time::Instant::now();
        while below.is_alive() {
            assert!(begun.elapsed().as_secs() < 60, "what was below it lives");
        }
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}

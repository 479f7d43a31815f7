//! Pid namespaces, in which tests have daemons and programs of another host.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail, ensure};

use crate::wait::until;
use crate::{Result, process};

/// A pid namespace with a mount namespace, which end with this.
#[derive(Debug)]
pub struct Namespace {
    unshare: Child,
    /// The first process.
    first: i32,
}

impl Namespace {
    /// Makes one, with a first process that does nothing but wait for orphans.
    pub fn new() -> Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL", "catatonit", "-P"]);
        let unshare = command.stdin(Stdio::null()).spawn().context("cannot start unshare")?;
        let pid = unshare.id() as i32;
        let first = until("the namespace has its first process", || {
            let first = process::tree(pid).get(1).copied();
            // unshare's child becomes it once the namespace is made.
            Ok(first.filter(|it| process::command_line(*it).contains("catatonit")))
        })?;
        Ok(Self { unshare, first })
    }

    /// The first process, by its number outside.
    pub fn first(&self) -> i32 {
        self.first
    }

    /// The way in.
    pub fn entry(&self) -> Entry {
        Entry { first: self.first }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Its end kills the first process, and that all others.
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
        let _ = process::wait_gone("the namespace's first process", self.first);
    }
}

/// The way into a pid namespace and its mount namespace.
#[derive(Clone, Debug)]
pub struct Entry {
    first: i32,
}

impl Entry {
    /// Starts a command in there, as a child of this process.
    pub fn spawn(&self, command: &mut Command) -> Result<Child> {
        let open = |name: &str| File::open(format!("/proc/{}/ns/{name}", self.first));
        let (pids, mounts) = (open("pid")?, open("mnt")?);
        let mounts = mounts.as_raw_fd();
        // SAFETY: the closure makes one system call, with a descriptor that is open until after the spawn.
        unsafe {
            command.pre_exec(move || match libc::setns(mounts, libc::CLONE_NEWNS) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        // The children of a thread are in the pid namespace that the thread has chosen: a thread of its own, which then ends.
        std::thread::scope(|scope| {
            let spawning = scope.spawn(|| {
                // SAFETY: changes this thread's namespace for children; no pointers.
                let entered = unsafe { libc::setns(pids.as_raw_fd(), libc::CLONE_NEWPID) };
                ensure!(entered == 0, "setns: {}", std::io::Error::last_os_error());
                Ok(command.spawn()?)
            });
            spawning.join().unwrap_or_else(|_| bail!("a thread that starts a command panicked"))
        })
    }
}

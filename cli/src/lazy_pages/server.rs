//! CRIU's server of pages (`criu lazy-pages`), which this thread traces.

use std::fs::File;
use std::io;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::ptr;
use std::sync::Arc;

use anyhow::{Context, bail};
use rustix::io::FdFlags;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::LOG;
use super::held::Held;

/// A server that is traced: it stops at its end, before it closes its files.
pub(super) struct Server {
    pid: i32,
    killer: Killer,
}

/// How a server ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// It has brought all pages, or the processes have ended.
    Done,
    /// It fails, with this status of wait(2).
    Failed(i32),
    /// Nobody knows how: it was killed twice, for example.
    Lost,
}

impl Ending {
    fn of(status: i32) -> Self {
        if status == 0 { Self::Done } else { Self::Failed(status) }
    }
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::Done => f.write_str("it has ended"),
            Self::Lost => f.write_str("it is gone"),
            Self::Failed(status) if libc::WIFSIGNALED(status) => {
                write!(f, "signal {} ended it", libc::WTERMSIG(status))
            }
            Self::Failed(status) => write!(f, "it has ended with exit code {}", libc::WEXITSTATUS(status)),
        }
    }
}

impl Server {
    /// Starts a server of the pages of an image, whose socket is in `folder`, and traces it. Its log is in `dir`. It keeps `lock` open while
    /// it lives. The file says when CRIU can connect: it has a byte then.
    pub(super) fn start(
        criu: &Path,
        (image, dir): (&Path, &Path),
        folder: &Path,
        lock: &File,
    ) -> anyhow::Result<(Self, File)> {
        let (ready, told) = io::pipe().context("cannot make a pipe")?;
        // This process starts no other program.
        for shared in [told.as_fd(), lock.as_fd()] {
            rustix::io::fcntl_setfd(shared, FdFlags::empty()).context("cannot share a descriptor with CRIU")?;
        }
        let mut command = Command::new(criu);
        command.args(["lazy-pages", "--images-dir"]).arg(image).arg("--work-dir").arg(folder);
        command.arg("--log-file").arg(dir.join(LOG)).arg("--status-fd").arg(told.as_raw_fd().to_string());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().with_context(|| format!("cannot run {}", criu.display()))?;
        drop(told);
        let seized = Self::seize(child.id().cast_signed()).inspect_err(|_| {
            // A server that nobody traces must not serve.
            let _ = child.kill();
            let _ = child.wait();
        });
        let server = seized.context("cannot trace criu lazy-pages")?;
        Ok((server, File::from(OwnedFd::from(ready))))
    }

    /// Traces a child of this process, whose number is no other's before it is let go.
    fn seize(pid: i32) -> io::Result<Self> {
        let number = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        let killer = Killer(Arc::new(pidfd_open(number, PidfdFlags::empty())?));
        // SAFETY: a call without memory of ours.
        let done = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, libc::PTRACE_O_TRACEEXIT) };
        if done == 0 { Ok(Self { pid, killer }) } else { Err(io::Error::last_os_error()) }
    }

    /// What can end the server, from any thread.
    pub(super) fn killer(&self) -> Killer {
        self.killer.clone()
    }

    /// Keeps the userfaultfds of a server that is stopped at its end.
    pub(super) fn hold_pages(&self) -> Held {
        Held::of(self.pid, &self.killer.0)
    }

    /// Waits until the server ends. It is stopped then, with its files open; after a second SIGKILL it is gone.
    pub(super) fn wait(&self) -> Ending {
        self.wait_for_end().unwrap_or(Ending::Lost)
    }

    fn wait_for_end(&self) -> io::Result<Ending> {
        loop {
            let mut status = 0;
            // SAFETY: the status is ours.
            if unsafe { libc::waitpid(self.pid, &raw mut status, libc::__WALL) } < 0 {
                match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => continue,
                    error => return Err(error),
                }
            }
            if !libc::WIFSTOPPED(status) {
                return Ok(Ending::of(status));
            }
            let signal = libc::WSTOPSIG(status);
            match status >> 16 {
                libc::PTRACE_EVENT_EXIT => return self.status_of_exit().map(Ending::of),
                // A signal that stops it: it stays so until SIGCONT.
                libc::PTRACE_EVENT_STOP if signal != libc::SIGTRAP => self.go_on(libc::PTRACE_LISTEN, 0),
                libc::PTRACE_EVENT_STOP => self.go_on(libc::PTRACE_CONT, 0),
                _ => self.go_on(libc::PTRACE_CONT, signal),
            }
        }
    }

    fn status_of_exit(&self) -> io::Result<i32> {
        let mut status: libc::c_ulong = 0;
        // SAFETY: the kernel writes one long to `status`.
        let done = unsafe { libc::ptrace(libc::PTRACE_GETEVENTMSG, self.pid, 0, &raw mut status) };
        if done == 0 { Ok(status as i32) } else { Err(io::Error::last_os_error()) }
    }

    /// Lets the server go on. It may be gone: then the next wait says so.
    fn go_on(&self, how: libc::c_uint, signal: i32) {
        // SAFETY: a call without memory of ours.
        unsafe { libc::ptrace(how, self.pid, ptr::null_mut::<libc::c_void>(), libc::c_long::from(signal)) };
    }

    /// Lets a server that ends go.
    pub(super) fn let_go(self) {
        self.go_on(libc::PTRACE_CONT, 0);
        let mut status = 0;
        // SAFETY: the status is ours.
        unsafe { libc::waitpid(self.pid, &raw mut status, libc::__WALL) };
    }
}

/// Ends a server.
#[derive(Clone)]
pub(super) struct Killer(Arc<OwnedFd>);

impl Killer {
    pub(super) fn kill(&self) {
        // A server that has ended needs no signal.
        let _ = pidfd_send_signal(&*self.0, Signal::KILL);
    }
}

/// Waits until CRIU says that it can be connected to.
pub(super) fn wait_until_ready(mut ready: File) -> anyhow::Result<()> {
    match ready.read(&mut [0]) {
        Ok(1) => Ok(()),
        Ok(_) => bail!("criu lazy-pages has not begun"),
        Err(error) => Err(error).context("cannot hear of criu lazy-pages"),
    }
}

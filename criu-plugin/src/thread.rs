//! Letting one thread of a stopped process run.
//!
//! The driver does its part of a checkpoint in a thread of the process itself. CRIU has stopped all threads by then and is their
//! tracer, so CRIU's process lets that thread run and stops it again. Meanwhile the thread gets no signals: what it does is the
//! driver's, and the program's handlers belong to after the dump.
//!
//! ```text
//!   stopped ── let_run: signals blocked, filters of system calls in force again ──► runs ── stop ──► stopped, as before
//! ```

use std::ffi::{c_int, c_void};
use std::io;
use std::time::{Duration, Instant};

use thiserror::Error;

/// Asked of a thread whose tracer has seized it, it is reported so (PTRACE_EVENT_STOP).
const EVENT_STOP: c_int = 128;
/// How long a thread may take to stop: it may be inside the driver, which answers no signal for a while.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause between two looks whether it has stopped.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// What CRIU's own code sets for threads that it has stopped.
const OPTIONS: c_int = libc::PTRACE_O_TRACESYSGOOD;
const SUSPEND_SECCOMP: c_int = 1 << 21;
const GETSIGMASK: u32 = 0x420a;
const SETSIGMASK: u32 = 0x420b;
/// The kernel's set of signals.
const MASK_BYTES: usize = 8;

/// A thread does not do as its tracer says.
#[derive(Debug, Error)]
pub enum ThreadError {
    /// A request of ptrace fails.
    #[error("cannot {what} thread {tid}, which works for the driver: {source}")]
    Trace {
        /// What was to be done.
        what: &'static str,
        /// The thread.
        tid: i32,
        /// The failure of the system call.
        source: io::Error,
    },
    /// The thread goes on for too long.
    #[error("thread {0}, which works for the driver, has not stopped after {time} s", time = STOP_TIMEOUT.as_secs())]
    RunsOn(i32),
    /// The thread is gone.
    #[error("thread {0}, which works for the driver, has ended")]
    Ended(i32),
}

/// A thread of a stopped process that runs. It is stopped again when this is dropped.
#[derive(Debug)]
pub struct RunningThread {
    tid: i32,
    /// The signals that the thread itself had blocked; none where it was not stopped, and so is not stopped again.
    blocked: Option<u64>,
}

impl RunningThread {
    /// Lets a thread run. One that is not stopped by this process runs already, as before a freeze.
    pub fn let_run(tid: i32) -> Result<Self, ThreadError> {
        if !is_ours(tid) {
            return Ok(Self { tid, blocked: None });
        }
        let mut blocked = 0_u64;
        trace("read the blocked signals of", GETSIGMASK, tid, MASK_BYTES, (&raw mut blocked).cast())?;
        let mut all = !(1_u64 << (libc::SIGTRAP - 1));
        trace("block signals of", SETSIGMASK, tid, MASK_BYTES, (&raw mut all).cast())?;
        let begun = trace("set the options of", libc::PTRACE_SETOPTIONS, tid, 0, std::ptr::null_mut())
            .and_then(|()| trace("continue", libc::PTRACE_CONT, tid, 0, std::ptr::null_mut()));
        if let Err(error) = begun {
            // The first failure says more.
            let _ = trace("restore the signals of", SETSIGMASK, tid, MASK_BYTES, (&raw mut blocked).cast());
            return Err(error);
        }
        Ok(Self { tid, blocked: Some(blocked) })
    }

    /// Stops the thread, if it was stopped before.
    pub fn stop(mut self) -> Result<(), ThreadError> {
        self.stop_now()
    }

    fn stop_now(&mut self) -> Result<(), ThreadError> {
        let Some(mut blocked) = self.blocked.take() else { return Ok(()) };
        let tid = self.tid;
        trace("interrupt", libc::PTRACE_INTERRUPT, tid, 0, std::ptr::null_mut())?;
        wait_until_stopped(tid)?;
        let options = |options: c_int| {
            trace(
                "set the options of",
                libc::PTRACE_SETOPTIONS,
                tid,
                0,
                std::ptr::without_provenance_mut(options as usize),
            )
        };
        // A CRIU without that right has not set this option either.
        options(OPTIONS | SUSPEND_SECCOMP).or_else(|_| options(OPTIONS))?;
        trace("restore the signals of", SETSIGMASK, tid, MASK_BYTES, (&raw mut blocked).cast())
    }
}

impl Drop for RunningThread {
    fn drop(&mut self) {
        if let Err(error) = self.stop_now() {
            crate::log::error(&error.to_string());
        }
    }
}

/// Whether this thread is the tracer of that one.
fn is_ours(tid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{tid}/status")).unwrap_or_default();
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    // SAFETY: no precondition.
    tracer.and_then(|it| it.trim().parse().ok()) == Some(unsafe { libc::gettid() })
}

fn trace(what: &'static str, request: u32, tid: i32, address: usize, data: *mut c_void) -> Result<(), ThreadError> {
    // SAFETY: the requests above take a number as address, and as data a number or a word that lives until after the call.
    let result = unsafe { libc::ptrace(request, tid, address, data) };
    if result == -1 {
        return Err(ThreadError::Trace { what, tid, source: io::Error::last_os_error() });
    }
    Ok(())
}

/// Waits for the stop that was asked for. Another stop on the way is one for a signal, which the thread gets.
fn wait_until_stopped(tid: i32) -> Result<(), ThreadError> {
    let deadline = Instant::now() + STOP_TIMEOUT;
    loop {
        let mut status = 0;
        // SAFETY: a live local. CRIU's own wait asks for this thread again only when it has stopped it.
        let found = unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL | libc::WNOHANG) };
        match found {
            0 if Instant::now() >= deadline => return Err(ThreadError::RunsOn(tid)),
            0 => std::thread::sleep(POLL_INTERVAL),
            -1 => {
                let source = io::Error::last_os_error();
                if source.kind() != io::ErrorKind::Interrupted {
                    return Err(ThreadError::Trace { what: "wait for", tid, source });
                }
            }
            _ if libc::WIFSTOPPED(status) && status >> 16 == EVENT_STOP => return Ok(()),
            _ if libc::WIFSTOPPED(status) => {
                let signal = std::ptr::without_provenance_mut(libc::WSTOPSIG(status) as usize);
                trace("continue", libc::PTRACE_CONT, tid, 0, signal)?;
            }
            _ => return Err(ThreadError::Ended(tid)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    const SEIZE: u32 = libc::PTRACE_SEIZE;

    /// A process that this thread has stopped as CRIU does.
    struct Stopped(Child);

    impl Stopped {
        fn new(script: &str) -> Self {
            let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            let tid = child.id() as i32;
            trace("seize", SEIZE, tid, 0, std::ptr::null_mut()).unwrap();
            trace("interrupt", libc::PTRACE_INTERRUPT, tid, 0, std::ptr::null_mut()).unwrap();
            wait_until_stopped(tid).unwrap();
            Self(child)
        }

        fn tid(&self) -> i32 {
            self.0.id() as i32
        }

        fn state(&self) -> String {
            let status = std::fs::read_to_string(format!("/proc/{}/status", self.tid())).unwrap();
            status.lines().find_map(|line| line.strip_prefix("State:")).unwrap().trim().chars().take(1).collect()
        }

        fn blocked(&self) -> String {
            let status = std::fs::read_to_string(format!("/proc/{}/status", self.tid())).unwrap();
            status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim().to_owned()
        }
    }

    impl Drop for Stopped {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_thread_runs_without_signals_and_stops_as_it_was() {
        let dir = std::env::temp_dir().join(format!("rekindle-thread-test-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("runs");
        let stopped = Stopped::new(&format!("while :; do : >{}; done", file.display()));
        let _ = std::fs::remove_file(&file);
        let before = stopped.blocked();
        let running = RunningThread::let_run(stopped.tid()).unwrap();
        while !file.exists() {
            std::thread::yield_now();
        }
        // It would end by this signal.
        // SAFETY: a signal to this test's own child.
        unsafe { libc::kill(stopped.tid(), libc::SIGTERM) };
        running.stop().unwrap();
        assert_eq!((stopped.state().as_str(), stopped.blocked()), ("t", before));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_thread_that_is_not_stopped_by_us_is_left_alone() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let running = RunningThread::let_run(child.id() as i32).unwrap();
        assert!(running.blocked.is_none());
        running.stop().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_thread_that_has_ended_is_said_to() {
        let stopped = Stopped::new("while :; do :; done");
        let running = RunningThread::let_run(stopped.tid()).unwrap();
        // SAFETY: a signal to this test's own child.
        unsafe { libc::kill(stopped.tid(), libc::SIGKILL) };
        while stopped.state() != "Z" {
            std::thread::yield_now();
        }
        let said = running.stop();
        assert!(matches!(said, Err(ThreadError::Ended(_) | ThreadError::Trace { .. })), "{said:?}");
    }
}

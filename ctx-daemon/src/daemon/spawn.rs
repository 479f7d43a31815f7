//! Starting a worker.
//!
//! A worker has a fixed address layout, so that what the driver maps by itself leaves the same addresses free in every
//! worker; a session of its own and no tie to the daemon's life, so that applications go on when a daemon is replaced;
//! and of all the daemon's descriptors the channel only.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rekindle_wire::attach::SETTINGS;
use rekindle_wire::control::WorkerReply;
use rekindle_wire::frame::{self, FrameError};
use thiserror::Error;
use tracing::info;

use super::worker::Worker;
use crate::config::Config;
use crate::rejoin::SOCKET_VARIABLE;

/// How long a worker may take to make its contexts: a machine with eight GPUs needs many seconds.
const READY_TIMEOUT: Duration = Duration::from_secs(120);

/// Environment variables that contexts depend on, by name.
pub(crate) type Settings = Vec<(String, String)>;

/// Why there is no worker.
#[derive(Debug, Error)]
pub(crate) enum SpawnError {
    #[error("cannot start {}: {source}", .program.display())]
    Start { program: PathBuf, source: io::Error },
    #[error("a worker cannot come up: {0}")]
    Failed(String),
    #[error(
        "a worker ended before it was ready ({status}): see its lines in the daemon's log; is there a GPU, and is {} the driver's library?",
        .driver.display()
    )]
    Ended { status: String, driver: PathBuf },
    #[error("a worker spoke in a way that this version does not understand: {0}")]
    Protocol(FrameError),
}

/// How workers are started.
#[derive(Clone, Debug)]
pub(crate) struct Spawner {
    program: PathBuf,
    cuda_driver: PathBuf,
    socket: PathBuf,
}

impl Spawner {
    /// By the configuration.
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            program: config.worker_program.clone(),
            cuda_driver: config.cuda_driver.clone(),
            socket: config.socket.clone(),
        }
    }

    /// Starts one and waits until it is ready.
    pub(crate) fn spawn(&self, settings: &Settings) -> Result<Arc<Worker>, SpawnError> {
        let started = std::time::Instant::now();
        let failed = |source| SpawnError::Start { program: self.program.clone(), source };
        let (channel, theirs) = UnixStream::pair().map_err(failed)?;
        let mut child = self.command(&theirs, settings).spawn().map_err(failed)?;
        drop(OwnedFd::from(theirs));
        let pid = child.id() as i32;
        match ready(&channel) {
            Ok(attached) => {
                let devices = attached.devices.len();
                let worker = Worker::new(pid, Some(child), attached, channel).map_err(failed)?;
                let ms = started.elapsed().as_millis() as u64;
                info!(worker = pid, devices, ms, "a worker is ready");
                Ok(worker)
            }
            Err(error) => {
                let status = end(&mut child);
                Err(match error {
                    NotReady::Says(reason) => SpawnError::Failed(reason),
                    NotReady::Closed => SpawnError::Ended { status, driver: self.cuda_driver.clone() },
                    NotReady::Frame(error) => SpawnError::Protocol(error),
                })
            }
        }
    }

    fn command(&self, channel: &UnixStream, settings: &Settings) -> Command {
        let fd = channel.as_raw_fd();
        let mut command = Command::new(&self.program);
        command
            .arg("worker")
            .arg("--channel-fd")
            .arg(fd.to_string())
            .arg("--cuda-driver")
            .arg(&self.cuda_driver)
            .env(SOCKET_VARIABLE, &self.socket)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        for name in SETTINGS {
            command.env_remove(name);
        }
        command.envs(settings.iter().map(|(name, value)| (name, value)));
        // SAFETY: the closure only makes system calls, which is all that may happen between fork and exec in a process
        // with threads.
        unsafe { command.pre_exec(move || become_worker(fd)) };
        command
    }
}

/// In the child, before it executes the program.
fn become_worker(channel: RawFd) -> io::Result<()> {
    let check = |result: i64| {
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: no pointers.
    unsafe {
        // Daemons started by others may have inherited descriptors that are not close-on-exec.
        check(libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC))?;
        check(i64::from(libc::fcntl(channel, libc::F_SETFD, 0)))?;
        check(i64::from(libc::setsid()))?;
        check(i64::from(libc::personality(libc::ADDR_NO_RANDOMIZE as _)))
    }
}

enum NotReady {
    Says(String),
    Closed,
    Frame(FrameError),
}

fn ready(channel: &UnixStream) -> Result<rekindle_wire::attach::Attached, NotReady> {
    let frame = |error| match error {
        FrameError::Closed => NotReady::Closed,
        FrameError::Io(error) if error.kind() == io::ErrorKind::ConnectionReset => NotReady::Closed,
        FrameError::Io(error) if error.kind() == io::ErrorKind::WouldBlock => {
            NotReady::Says(format!("not ready after {} s", READY_TIMEOUT.as_secs()))
        }
        error => NotReady::Frame(error),
    };
    let timeout = |time| channel.set_read_timeout(time).map_err(|e| frame(e.into()));
    timeout(Some(READY_TIMEOUT))?;
    let message = frame::receive::<WorkerReply>(channel).map_err(frame)?;
    timeout(None)?;
    match message.body {
        WorkerReply::Ready { attached } => Ok(attached),
        WorkerReply::Failed { reason } => Err(NotReady::Says(reason)),
        _ => Err(NotReady::Says("it is not of this version of Rekindle".to_owned())),
    }
}

/// Ends a worker that is of no use, and reaps it.
fn end(child: &mut Child) -> String {
    // One that ended by itself keeps its status.
    if let Ok(Some(status)) = child.try_wait() {
        return status.to_string();
    }
    std::thread::sleep(Duration::from_millis(200));
    let _ = child.kill();
    match child.wait() {
        Ok(status) => status.to_string(),
        Err(error) => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spawn(script: &str) -> Result<Arc<Worker>, SpawnError> {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("worker");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, mode).unwrap();
        let spawner = Spawner { program, cuda_driver: "libcuda.so.1".into(), socket: "/nowhere".into() };
        spawner.spawn(&Vec::new())
    }

    #[test]
    fn a_worker_that_ends_at_once_is_told_by_its_status() {
        let error = spawn("exit 7").unwrap_err().to_string();
        assert!(error.contains("exit status: 7"), "{error}");
    }

    #[test]
    fn a_worker_has_a_fixed_layout_and_only_its_channel() {
        // The shell sees its own descriptors through its own /proc/self.
        let report = tempfile::NamedTempFile::new().unwrap();
        let path = report.path().display();
        let script = format!("(echo $3; ls /proc/$$/fd; cat /proc/$$/personality) > {path}");
        spawn(&script).unwrap_err();
        let text = std::fs::read_to_string(report.path()).unwrap();
        let lines: Vec<_> = text.lines().collect();
        let (channel, personality) = (lines[0], lines[lines.len() - 1]);
        // 10 is what some shells keep their script at.
        let rest: Vec<_> =
            lines[1..lines.len() - 1].iter().filter(|fd| !["0", "1", "2", "10", "255", channel].contains(fd)).collect();
        assert!(rest.is_empty(), "{text}");
        assert_eq!(personality, "00040000", "{text}");
    }
}

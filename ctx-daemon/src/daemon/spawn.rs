//! Starting a worker.
//!
//! A worker has a fixed address layout, so that the driver's own mappings leave the same addresses free in every worker. A
//! worker has a session of its own and no tie to the daemon's life, so that applications go on when a daemon is replaced. Of
//! the daemon's descriptors a worker has only the channel.

use rekindle_ctx_worker::{Reporting, VirtualGpus};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rekindle_wire::attach::{Attached, Device, SETTINGS};
use rekindle_wire::control::WorkerReply;
use rekindle_wire::frame::{self, FrameError};
use rekindle_wire::gpus;
use rekindle_wire::version::is_spoken;
use thiserror::Error;
use tracing::{info, warn};

use super::sandbox::{NoUser, Sandbox};
use super::sys;
use super::worker::Worker;
use crate::config::Config;
use rekindle_ctx_worker::confinement::Confinement;
use rekindle_ctx_worker::rejoin::SOCKET_VARIABLE;

/// Tells a worker after how many milliseconds without a word from its daemon it goes on by itself.
pub(crate) const SILENCE_VARIABLE: &str = "REKINDLE_SILENCE_MS";

/// The driver shows a process these GPUs only, in this order, and numbers them anew.
pub(crate) const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// Environment variables that contexts depend on, by name.
pub(crate) type Settings = Vec<(String, String)>;

/// Why a worker could not be started.
#[derive(Debug, Error)]
pub(crate) enum SpawnError {
    #[error("cannot start {}: {source}", .program.display())]
    Start { program: PathBuf, source: io::Error },
    #[error(transparent)]
    NoUser(#[from] NoUser),
    #[error("a worker cannot start: {0}")]
    Failed(String),
    #[error(
        "a worker ended before it was ready ({status}): see its lines in the daemon's log; is there a GPU, and is {} the driver's library?",
        .driver.display()
    )]
    Ended { status: String, driver: PathBuf },
    #[error(
        "a worker was not ready after {} ms and was killed: does {} hang? See whether nvidia-smi answers", .after.as_millis(),
        .driver.display()
    )]
    Hangs { after: Duration, driver: PathBuf },
    #[error("a worker sent a malformed message: {0}")]
    Protocol(FrameError),
}

/// How workers are started.
#[derive(Clone, Debug)]
pub(crate) struct Spawner {
    program: PathBuf,
    cuda_driver: PathBuf,
    socket: PathBuf,
    slow: Duration,
    timeout: Duration,
    silence: Duration,
    sandbox: Sandbox,
    report_access: Option<Reporting>,
    /// The virtual GPUs that each GPU is shown as.
    parts: Option<u32>,
}

impl Spawner {
    /// A spawner for the configuration.
    pub(crate) fn new(config: &Config, sandbox: &Sandbox) -> Self {
        Self {
            program: config.workers.program.clone(),
            cuda_driver: config.workers.cuda_driver.clone(),
            socket: config.socket.path.clone(),
            slow: config.workers.slow_start,
            timeout: config.workers.start_timeout,
            silence: config.workers.silence_timeout,
            sandbox: sandbox.clone(),
            report_access: config.workers.report_access,
            parts: config.gpu.parts,
        }
    }

    /// How long a start may take.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Starts a worker and waits until it is ready. `seen` are the devices that workers of the usual kind see. `slow` is called if
    /// the start takes long; the worker may still become ready.
    pub(crate) fn spawn(
        &self,
        settings: &Settings,
        seen: &[Device],
        slow: impl FnOnce(),
    ) -> Result<Arc<Worker>, SpawnError> {
        let started = std::time::Instant::now();
        let failed = |source| SpawnError::Start { program: self.program.clone(), source };
        let (channel, theirs) = UnixStream::pair().map_err(failed)?;
        let (confined, user) = self.sandbox.confine()?.unzip();
        let mut child = self.command(&theirs, settings, seen, confined).spawn().map_err(failed)?;
        drop(OwnedFd::from(theirs));
        let pid = child.id() as i32;
        match self.ready(pid, &channel, slow) {
            Ok((attached, wire)) => {
                let devices = attached.devices.len();
                let child = Some((child, user.flatten()));
                let worker = Worker::new(pid, child, attached, wire, channel).map_err(failed)?;
                let ms = started.elapsed().as_millis() as u64;
                info!(worker = pid, devices, ms, "a worker is ready");
                Ok(worker)
            }
            Err(error) => {
                let status = end(&mut child);
                Err(match error {
                    NotReady::Says(reason) => SpawnError::Failed(reason),
                    NotReady::Slow => SpawnError::Hangs { after: self.timeout, driver: self.cuda_driver.clone() },
                    NotReady::Closed => SpawnError::Ended { status, driver: self.cuda_driver.clone() },
                    NotReady::Frame(error) => SpawnError::Protocol(error),
                })
            }
        }
    }

    /// Waits for the worker's first message. Returns its devices, and the control version that it speaks.
    fn ready(&self, pid: i32, channel: &UnixStream, slow: impl FnOnce()) -> Result<(Attached, u32), NotReady> {
        let speaks_within = |time| {
            let readable = sys::wait_readable([channel.as_fd()], Some(time));
            readable.map(|[it]| it).map_err(|error| NotReady::Frame(error.into()))
        };
        if !speaks_within(self.slow.min(self.timeout))? {
            let ms = self.slow.as_millis() as u64;
            warn!(worker = pid, "a worker is not ready after {ms} ms: the driver may hang");
            slow();
            if !speaks_within(self.timeout.saturating_sub(self.slow))? {
                return Err(NotReady::Slow);
            }
        }
        // A worker that has begun a message sends all of it at once; anything else is no worker.
        let frame = |error| match error {
            FrameError::Closed => NotReady::Closed,
            FrameError::Io(error) if error.kind() == io::ErrorKind::ConnectionReset => NotReady::Closed,
            error => NotReady::Frame(error),
        };
        let limited = |time| channel.set_read_timeout(time).map_err(|error| NotReady::Frame(error.into()));
        limited(Some(self.timeout))?;
        let message = frame::receive::<WorkerReply>(channel).map_err(frame)?;
        limited(None)?;
        match message.body {
            WorkerReply::Ready { attached, wire, oldest } if is_spoken(oldest, wire) => Ok((attached, wire)),
            WorkerReply::Ready { wire, .. } => Err(NotReady::Says(format!(
                "the worker speaks control version {wire}, and this rekindled {} does not: restart the daemon, since its program has been replaced",
                env!("CARGO_PKG_VERSION")
            ))),
            WorkerReply::Failed(failure) => Err(NotReady::Says(failure.reason)),
            _ => Err(NotReady::Says("it is not of this version of Rekindle".to_owned())),
        }
    }

    fn command(
        &self,
        channel: &UnixStream,
        settings: &Settings,
        seen: &[Device],
        confined: Option<Confinement>,
    ) -> Command {
        let fd = channel.as_raw_fd();
        let mut command = Command::new(&self.program);
        command
            .arg("worker")
            .arg("--channel-fd")
            .arg(fd.to_string())
            .arg("--cuda-driver")
            .arg(&self.cuda_driver)
            .env(SOCKET_VARIABLE, &self.socket)
            .env(SILENCE_VARIABLE, self.silence.as_millis().to_string())
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        if let Some(confined) = confined {
            // The driver's cache of compiled code would be shared by all clients.
            command.arg("--confined").arg(confined.to_string()).env("CUDA_CACHE_DISABLE", "1");
        }
        if let Some(mode) = self.report_access {
            command.arg("--report-access").arg(mode.to_string());
        }
        for name in SETTINGS {
            command.env_remove(name);
        }
        command.envs(settings.iter().map(|(name, value)| (name, value)));
        if let Some(per_gpu) = self.parts {
            let names = settings.iter().find(|(name, _)| name == VISIBLE_DEVICES);
            let visible: Option<Vec<_>> = names.map(|(_, names)| names.split(',').filter_map(gpus::uuid).collect());
            // The driver knows no virtual GPUs. It shows the GPUs that they are parts of, numbered in the same order wherever these
            // are, since addresses depend on the numbers; the worker chooses among their parts.
            if let Some(visible) = &visible {
                command.env(VISIBLE_DEVICES, names_of_wholes(visible, seen));
            }
            command.arg("--virtual-gpus").arg(VirtualGpus { per_gpu, visible }.to_string());
        }
        become_helper(&mut command, fd);
        command
    }
}

/// The names of the GPUs that these virtual GPUs are parts of, each once.
fn names_of_wholes(parts: &[[u8; 16]], seen: &[Device]) -> String {
    let whole = |part: &[u8; 16]| seen.iter().find(|it| it.uuid == *part)?.part_of;
    let mut names: Vec<String> = Vec::new();
    for name in parts.iter().filter_map(whole).map(|uuid| gpus::name(&uuid)) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.join(",")
}

/// Has a child of the daemon begin in a session of its own, with none of the daemon's descriptors but the channel.
pub(crate) fn become_helper(command: &mut Command, channel: RawFd) {
    // SAFETY: the closure only makes system calls, which is all that may happen between fork and exec in a process with
    // threads.
    unsafe { command.pre_exec(move || become_worker(channel)) };
}

/// Runs in the child, before it executes the program.
fn become_worker(channel: RawFd) -> io::Result<()> {
    let check = |result: i64| {
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: no pointers.
    unsafe {
        // A daemon started by another program may have inherited descriptors that are not close-on-exec.
        check(libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC))?;
        check(i64::from(libc::fcntl(channel, libc::F_SETFD, 0)))?;
        check(i64::from(libc::setsid()))?;
        check(i64::from(libc::personality(libc::ADDR_NO_RANDOMIZE as _)))
    }
}

enum NotReady {
    Says(String),
    Slow,
    Closed,
    Frame(FrameError),
}

/// Ends a worker that is of no use, and reaps it.
fn end(child: &mut Child) -> String {
    // A worker that ended by itself keeps its status.
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
    use crate::config::SandboxConfig;

    fn spawn(script: &str) -> Result<Arc<Worker>, SpawnError> {
        let visible = [7, 6].map(|it| gpus::name(&[it; 16])).join(",");
        let settings = vec![(VISIBLE_DEVICES.to_owned(), visible)];
        let seen = [6, 7].map(|it| Device {
            name: String::new(),
            uuid: [it; 16],
            memory: 0,
            pci_bus_id: String::new(),
            attributes: Vec::new(),
            stream_priorities: (0, 0),
            peers: Vec::new(),
            part_of: Some([5; 16]),
        });
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("worker");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, mode).unwrap();
        let (slow, timeout) = (Duration::from_millis(50), Duration::from_millis(100));
        let spawner = Spawner {
            program,
            cuda_driver: "libcuda.so.1".into(),
            socket: "/nowhere".into(),
            slow: if script.contains("sleep") { slow } else { Duration::from_secs(60) },
            timeout: if script.contains("sleep") { timeout } else { Duration::from_secs(120) },
            silence: Duration::from_secs(30),
            sandbox: Sandbox::probe(&SandboxConfig::default()).unwrap(),
            report_access: None,
            parts: Some(2),
        };
        spawner.spawn(&settings, &seen, || SLOW.set(SLOW.get() + 1))
    }

    thread_local! {
        static SLOW: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    }

    #[test]
    fn a_worker_that_hangs_is_said_to_be_slow_and_then_killed() {
        let error = spawn("exec sleep 600").unwrap_err().to_string();
        assert!(error.contains("was killed: does libcuda.so.1 hang?"), "{error}");
        assert_eq!(SLOW.get(), 1);
    }

    #[test]
    fn a_worker_that_ends_at_once_is_told_by_its_status() {
        let error = spawn("exit 7").unwrap_err().to_string();
        assert!(error.contains("exit status: 7"), "{error}");
    }

    #[test]
    fn a_worker_chooses_among_virtual_gpus_and_the_driver_shows_their_gpu() {
        let report = tempfile::NamedTempFile::new().unwrap();
        let path = report.path().display();
        spawn(&format!("echo $@ ${{CUDA_VISIBLE_DEVICES-none}} > {path}")).unwrap_err();
        let text = std::fs::read_to_string(report.path()).unwrap();
        let [seven, six, whole] = [7, 6, 5].map(|it| gpus::name(&[it; 16]));
        assert!(text.ends_with(&format!("--virtual-gpus 2:{seven},{six} {whole}\n")), "{text}");
    }

    #[test]
    fn a_worker_has_a_fixed_layout_and_only_its_channel() {
        // The shell lists its own descriptors through its own /proc/self.
        let report = tempfile::NamedTempFile::new().unwrap();
        let path = report.path().display();
        let script = format!("(echo $3; ls /proc/$$/fd; cat /proc/$$/personality) > {path}");
        spawn(&script).unwrap_err();
        let text = std::fs::read_to_string(report.path()).unwrap();
        let lines: Vec<_> = text.lines().collect();
        let (channel, personality) = (lines[0], lines[lines.len() - 1]);
        // Some shells keep their script open at 10.
        let rest: Vec<_> =
            lines[1..lines.len() - 1].iter().filter(|fd| !["0", "1", "2", "10", "255", channel].contains(fd)).collect();
        assert!(rest.is_empty(), "{text}");
        assert_eq!(personality, "00040000", "{text}");
    }
}

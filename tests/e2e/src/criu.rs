//! `criu dump` and `criu restore`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context, ensure};
use rekindle_wire::control::FailureKind;

use crate::{Result, stage, until};

/// The number of log lines that a failing test shows.
const TAIL: usize = 15;

/// The fate of the processes after a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// CRIU kills them.
    Killed,
    /// `--leave-running`.
    Running,
}

/// A running CRIU.
#[derive(Debug)]
pub struct Running {
    child: Child,
    log: PathBuf,
}

/// A CRIU that has ended.
pub struct Outcome {
    /// The exit status.
    pub status: ExitStatus,
    /// The whole log.
    pub log: String,
}

/// The daemon that CRIU's plugin connects to, and the plugins that CRIU loads.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The daemon's socket.
    pub socket: PathBuf,
    /// A folder of plugins to use instead of Rekindle's.
    pub plugins: Option<PathBuf>,
    /// CRIU's action script.
    pub script: Option<PathBuf>,
    /// Whether the processes have TCP connections among each other (`--tcp-established`).
    pub connections: bool,
}

impl Setting {
    /// Starts a dump of the process tree below `root` into `dir`.
    pub fn dump(&self, root: i32, dir: &Path, fate: Fate, log: PathBuf) -> Result<Running> {
        let mut command = self.command("dump", dir, &log)?;
        command.arg("--tree").arg(root.to_string());
        if fate == Fate::Running {
            command.arg("--leave-running");
        }
        Running::start(command, log)
    }

    /// Starts a pre-dump, which copies memory ahead of a dump.
    pub fn pre_dump(&self, root: i32, dir: &Path, log: PathBuf) -> Result<Running> {
        let mut command = self.command("pre-dump", dir, &log)?;
        command.arg("--tree").arg(root.to_string());
        Running::start(command, log)
    }

    /// Starts a restore. CRIU detaches from the restored processes, which become children of this process.
    pub fn restore(&self, dir: &Path, log: PathBuf) -> Result<Running> {
        let mut command = self.command("restore", dir, &log)?;
        command.arg("--restore-detached");
        Running::start(command, log)
    }

    /// The log lies outside the image directory, whose disk may be full.
    fn command(&self, verb: &str, dir: &Path, log: &Path) -> Result<Command> {
        let mut command = stage::criu()?;
        stage::clean_environment(&mut command);
        command.arg(verb).arg("--images-dir").arg(dir).arg("--log-file").arg(log).arg("-v4");
        command.env("REKINDLE_SOCKET", &self.socket).current_dir("/");
        if self.connections {
            // Ranks of NCCL, which have connections, have files of tens of MiB without a name too.
            command.args(["--tcp-established", "--ghost-limit", "1G"]);
        }
        if let Some(plugins) = &self.plugins {
            command.arg("--libdir").arg(plugins);
        }
        if let Some(script) = &self.script {
            command.arg("--action-script").arg(script);
        }
        Ok(command)
    }
}

impl Running {
    fn start(mut command: Command, log: PathBuf) -> Result<Self> {
        crate::process::adopt_orphans();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().context("cannot start criu")?;
        Ok(Self { child, log })
    }

    /// The process id.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Whether CRIU still runs.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// The log so far.
    pub fn whole_log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// The end of the log so far, with earlier lines that report errors.
    pub fn log(&self) -> String {
        tail(&self.whole_log())
    }

    /// Waits until CRIU ends.
    pub fn wait(mut self) -> Result<Outcome> {
        let ended = until("criu ends", || Ok(self.child.try_wait()?));
        let status = match ended {
            Ok(status) => status,
            Err(error) => {
                let _ = self.child.kill();
                return Err(error.context(self.log()));
            }
        };
        let log = fs::read(&self.log).unwrap_or_default();
        Ok(Outcome { status, log: String::from_utf8_lossy(&log).into_owned() })
    }
}

/// Shows only a part of the log, which is long.
impl std::fmt::Debug for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "criu ended with {}:\n{}", self.status, tail(&self.log))
    }
}

impl Outcome {
    /// The kind of failure that the daemon reported to the plugin; `None` if it reported none.
    pub fn failure_kind(&self) -> Option<FailureKind> {
        let mut said = self.log.lines().filter_map(|line| Some(line.split_once("rekindle: failure kind: ")?.1));
        said.next_back().map(|name| FailureKind::from(name.trim().to_owned()))
    }

    /// Checks that CRIU succeeded.
    pub fn succeeds(self) -> Result<Self> {
        ensure!(self.status.success(), "criu ended with {}:\n{}", self.status, tail(&self.log));
        Ok(self)
    }

    /// Checks that CRIU failed and that its log contains `reason`.
    pub fn fails_with(self, reason: &str) -> Result<Self> {
        ensure!(!self.status.success(), "criu succeeded, and was to fail with {reason:?}");
        ensure!(self.log.contains(reason), "criu's log does not say {reason:?}:\n{}", tail(&self.log));
        Ok(self)
    }
}

/// The lines of a log that report errors, and its last lines.
pub fn tail(log: &str) -> String {
    let lines: Vec<_> = log.lines().collect();
    let (before, end) = lines.split_at(lines.len().saturating_sub(TAIL));
    let telling = |line: &&&str| ["rror", "WARN", "arn ", "rekindle: "].iter().any(|word| line.contains(word));
    let mut shown: Vec<_> = before.iter().filter(telling).take(TAIL).copied().collect();
    shown.extend(end);
    shown.join("\n")
}

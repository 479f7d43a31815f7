//! The engine that has the containers: podman, Docker or nerdctl, and questions to it.
//!
//! podman exports checkpoints as archives, and checkpoints pods. Docker and nerdctl keep checkpoints under names, and restore a
//! container only from those that they keep. Their CRIU is started by a daemon, so it talks to Rekindle at the default socket.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};
use clap::ValueEnum;

use crate::criu;
use crate::failure::Failure;

/// An engine that can checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    #[default]
    Podman,
    Docker,
    Nerdctl,
}

impl Kind {
    /// The name of its program.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Podman => "podman",
            Self::Docker => "docker",
            Self::Nerdctl => "nerdctl",
        }
    }

    /// Whether it keeps checkpoints under names, and offers no more than that.
    pub(crate) fn names_checkpoints(self) -> bool {
        self != Self::Podman
    }

    /// Whether a checkpoint of the engine's needs a name. Refuses what the engine does not have: a name, with podman; one of podman's
    /// options, or one for CRIU, with the others.
    pub(crate) fn needs_name(
        self,
        checkpoint: Option<&str>,
        of_podman: Option<&str>,
        of_criu: Option<&str>,
    ) -> Result<bool, Failure> {
        if !self.names_checkpoints() {
            return match checkpoint {
                Some(_) => Err(Failure::usage(anyhow!(
                    "podman gives checkpoints no names: leave out --checkpoint, or give --engine docker or nerdctl"
                ))),
                None => Ok(false),
            };
        }
        if let Some(option) = of_podman {
            return Err(Failure::usage(anyhow!("{self} has nothing like {option}: leave it out, or use podman")));
        }
        if let Some(option) = of_criu {
            let name = option.trim_start_matches('-');
            return Err(Failure::usage(anyhow!(
                "{self} does not pass {option} on: write `{name}` into /etc/criu/runc.conf instead, for all of its containers"
            )));
        }
        Ok(true)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An engine and its program.
#[derive(Clone, Debug)]
pub(crate) struct Engine {
    pub(crate) kind: Kind,
    pub(crate) program: PathBuf,
}

impl Engine {
    /// The engine with the program that was named, or the one in PATH.
    pub(crate) fn new(kind: Kind, named: Option<&Path>) -> Self {
        Self { kind, program: named.map_or_else(|| kind.name().into(), Path::to_owned) }
    }

    /// podman.
    pub(crate) fn podman(named: Option<&Path>) -> Self {
        Self::new(Kind::Podman, named)
    }

    /// The first process of a container that runs.
    pub(crate) fn pid(&self, name: &str) -> Result<i32, Failure> {
        let engine = self.kind;
        let (status, pid) = self.status(name)?;
        match (status.as_str(), pid) {
            // The freezer of its cgroup has its processes, and the engine and CRIU refuse it.
            ("paused", _) => Err(Failure::refused(anyhow!(
                "container {name} is paused, and {engine} checkpoints only those that run: `{engine} unpause {name}` first"
            ))),
            (_, Some(pid)) => Ok(pid),
            _ => Err(Failure::refused(anyhow!("container {name} is not running"))),
        }
    }

    /// The status of a container and its first process, if it has one.
    fn status(&self, name: &str) -> Result<(String, Option<i32>), Failure> {
        let said = self
            .ask(&["container", "inspect", "--format", "{{.State.Status}} {{.State.Pid}}", name])
            .map_err(|said| said.refused(&format!("{} knows no container {name}", self.kind)))?;
        let (status, pid) = said.trim().split_once(' ').unwrap_or_default();
        Ok((status.to_owned(), pid.parse().ok().filter(|pid| *pid > 0)))
    }

    /// Whether a container has processes, be they paused.
    pub(crate) fn runs(&self, name: &str) -> Result<bool, Failure> {
        let (status, _) = self.status(name)?;
        Ok(matches!(status.as_str(), "running" | "paused" | "pausing" | "restarting"))
    }

    /// Makes a checkpoint of Docker's differ from what containerd may have of it since it was made: Docker copies it into containerd's store before
    /// it restores it, and fails if the same bytes are there ("failed to upload checkpoint to containerd: ... already exists"; seen with
    /// Docker 26.1). The time of a file is part of these. Where the files cannot be reached, Docker is asked all the same.
    pub(crate) fn tell_apart(&self, name: &str, checkpoint: &str) {
        if self.kind != Kind::Docker {
            return;
        }
        let said = |arguments: &[&str]| self.ask(arguments).ok().map(|it| it.trim().to_owned());
        let root = said(&["info", "--format", "{{.DockerRootDir}}"]);
        let id = said(&["container", "inspect", "--format", "{{.Id}}", name]);
        if let Some((root, id)) = root.zip(id) {
            let dir = Path::new(&root).join("containers").join(id).join("checkpoints").join(checkpoint);
            let opened = fs::File::options().write(true).open(dir.join("inventory.img"));
            let _ = opened.and_then(|it| it.set_modified(std::time::SystemTime::now()));
        }
    }

    /// The names of the containers that run.
    pub(crate) fn running(&self) -> Result<Vec<String>, Failure> {
        let said = self
            .ask(&["ps", "--filter", "status=running", "--format", "{{.Names}}"])
            .map_err(|said| said.failed(&format!("{} does not list containers", self.kind)))?;
        // A container has one name; others are those of its links.
        Ok(said.lines().filter_map(|line| line.split(',').next()).map(|it| it.trim().to_owned()).collect())
    }

    /// The error if the program could not be started.
    pub(crate) fn no_program(&self) -> String {
        let advice = match self.kind {
            Kind::Podman => "install podman, or name its program with --podman",
            Kind::Docker => "install Docker (the package docker.io of Debian), or choose another --engine",
            Kind::Nerdctl => "install nerdctl 2.2 or newer in PATH, or choose another --engine",
        };
        format!("cannot run {} ({advice})", self.program.display())
    }

    /// The errors of an engine that has failed: those in CRIU's log, which runc and crun name, and its own, with what to do.
    pub(crate) fn errors(&self, said: &[u8]) -> Vec<String> {
        let said = String::from_utf8_lossy(said);
        let log = said.split_whitespace().map(|word| word.trim_matches(|c: char| !c.is_alphanumeric() && c != '/'));
        let log = log.filter(|word| word.starts_with('/') && word.ends_with(".log")).find_map(|it| fs::read(it).ok());
        let mut errors = criu::errors(&String::from_utf8_lossy(&log.unwrap_or_default()));
        let line = |line: &str| {
            line.trim().to_owned() + &advice(self.kind, line).map_or_else(String::new, |it| format!(" ({it})"))
        };
        errors.extend(said.lines().filter(|line| !line.trim().is_empty()).map(line));
        errors
    }

    /// The standard input of an engine that checkpoints or restores. A supervisor of `rekindle protect` hands its lock on, a file: another
    /// supervisor waits until the engine has ended, too. Anything else is kept from the engine.
    pub(crate) fn lock_on_stdin() -> Stdio {
        let is_file = rustix::fs::fstat(rustix::stdio::stdin())
            .is_ok_and(|it| rustix::fs::FileType::from_raw_mode(it.st_mode) == rustix::fs::FileType::RegularFile);
        if is_file { Stdio::inherit() } else { Stdio::null() }
    }

    /// What the engine prints. podman's functions ask with this, too.
    pub(crate) fn ask(&self, arguments: &[&str]) -> Result<String, NoAnswer> {
        let mut command = Command::new(&self.program);
        command.args(arguments).stdin(Stdio::null());
        let output = command.output().with_context(|| self.no_program()).map_err(NoAnswer)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let advice = said.lines().find_map(|line| advice(self.kind, line));
        let advice = advice.map_or_else(String::new, |it| format!(" ({it})"));
        Err(NoAnswer(anyhow!("{}{advice}", said.trim())))
    }
}

/// What the engine says instead of an answer.
pub(crate) struct NoAnswer(anyhow::Error);

impl NoAnswer {
    /// It cannot be done.
    pub(crate) fn refused(self, what: &str) -> Failure {
        Failure::refused(self.0.context(what.to_owned()))
    }

    pub(crate) fn failed(self, what: &str) -> Failure {
        self.0.context(what.to_owned()).into()
    }
}

/// Refuses the name of a checkpoint that is none, or that an engine would take for an option or a path.
pub(crate) fn check_name(name: &str) -> Result<(), Failure> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(plain) {
        return Ok(());
    }
    let rule = "letters, digits, `_`, `-` and `.`, of which the first is a letter or a digit";
    Err(Failure::usage(anyhow!("{name:?} is no name of a checkpoint: it has {rule}")))
}

/// What to do about a line that Docker or nerdctl prints; podman's own say it.
fn advice(kind: Kind, line: &str) -> Option<&'static str> {
    let has = |part: &str| line.contains(part);
    match kind {
        Kind::Podman => None,
        Kind::Docker if has("Cannot connect to the Docker daemon") || has("failed to connect to the docker API") => {
            Some("start Docker's daemon: `systemctl start docker`")
        }
        Kind::Docker if has("permission denied") && has("ocker") && has("sock") => Some("run this as root"),
        Kind::Docker if has("experimental features enabled") => {
            Some("add \"experimental\": true to /etc/docker/daemon.json, and restart Docker's daemon")
        }
        Kind::Docker | Kind::Nerdctl if has("checkpoint") && (has("already exists") || has("file exists")) => {
            Some("choose another name with --checkpoint, or remove that checkpoint with `checkpoint rm`")
        }
        Kind::Nerdctl if has("unknown command") || has("unknown subcommand") || has("unknown flag: --checkpoint") => {
            Some("checkpoints need nerdctl 2.2 or newer")
        }
        Kind::Nerdctl if has("cannot access containerd socket") || has("containerd.sock") => {
            Some("start containerd: `systemctl start containerd`")
        }
        Kind::Nerdctl if has("rootless containerd not running") => Some("run this as root"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_criu_says_comes_before_what_the_engine_says() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("dump.log");
        fs::write(&log, "(00.2) Error (criu/tty.c:1): a\n").unwrap();
        let said = format!("criu failed: log file: {}: unknown\n\nError: exit status 1\n", log.display());
        for kind in [Kind::Podman, Kind::Docker, Kind::Nerdctl] {
            let found = Engine::new(kind, None).errors(said.as_bytes());
            assert_eq!((found[0].as_str(), found.len()), ("Error (criu/tty.c:1): a", 3));
        }
        assert_eq!(Engine::podman(None).errors(b"Error: no\n"), ["Error: no"]);
    }

    #[test]
    fn the_name_of_a_checkpoint_is_no_path_and_no_option() {
        for name in ["one", "1-a_b.c"] {
            check_name(name).unwrap();
        }
        for name in ["", "-x", "..", "a/b", "a b"] {
            assert!(check_name(name).unwrap_err().to_string().contains("is no name"), "{name}");
        }
    }

    #[test]
    fn an_engine_that_cannot_says_what_to_do() {
        let advice = |kind, line: &str| advice(kind, line).unwrap_or_default();
        let not_there =
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?";
        assert!(advice(Kind::Docker, not_there).contains("systemctl start docker"));
        let off = "docker checkpoint create is only supported on a Docker daemon with experimental features enabled";
        assert!(advice(Kind::Docker, off).contains("\"experimental\": true"));
        let twice = "Error response from daemon: checkpoint with name one already exists for container job";
        assert!(advice(Kind::Docker, twice).contains("--checkpoint"));
        assert!(advice(Kind::Nerdctl, "FATA[0000] unknown subcommand \"checkpoint\" for \"nerdctl\"").contains("2.2"));
        assert_eq!(advice(Kind::Podman, off), "");
        assert_eq!(advice(Kind::Docker, "Error response from daemon: No such container: job"), "");
    }
}

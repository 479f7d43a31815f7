//! Questions to podman.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};
use serde::Deserialize;

use crate::criu;
use crate::failure::Failure;

/// The podman program: the one that was named, or the one in PATH.
pub(crate) fn program(named: Option<&Path>) -> PathBuf {
    named.map_or_else(|| "podman".into(), Path::to_owned)
}

/// The first process of a container that runs.
pub(crate) fn pid(program: &Path, name: &str) -> Result<i32, Failure> {
    let said = ask(program, &["container", "inspect", "--format", "{{.State.Status}} {{.State.Pid}}", name])
        .map_err(|said| said.refused(&format!("podman knows no container {name}")))?;
    let (status, pid) = said.trim().split_once(' ').unwrap_or_default();
    match (status, pid.parse()) {
        // The freezer of its cgroup has its processes, and podman and CRIU refuse it.
        ("paused", _) => {
            let advice = format!("`podman unpause {name}` first");
            Err(Failure::refused(anyhow!(
                "container {name} is paused, and podman checkpoints only those that run: {advice}"
            )))
        }
        (_, Ok(pid)) if pid > 0 => Ok(pid),
        _ => Err(Failure::refused(anyhow!("container {name} is not running"))),
    }
}

/// The names of the containers that run.
pub(crate) fn running(program: &Path) -> Result<Vec<String>, Failure> {
    let said = ask(program, &["ps", "--filter", "status=running", "--format", "{{.Names}}"])
        .map_err(|said| said.failed("podman does not list containers"))?;
    // A container has one name; others are those of its links.
    Ok(said.lines().filter_map(|line| line.split(',').next()).map(|it| it.trim().to_owned()).collect())
}

/// A container of a pod.
#[derive(Debug, Deserialize, PartialEq, Eq)]
pub(crate) struct Member {
    #[serde(rename = "Id")]
    id: String,
    #[serde(rename = "Name")]
    pub(crate) name: String,
    #[serde(rename = "State")]
    state: String,
}

/// A pod.
#[derive(Debug, Deserialize)]
pub(crate) struct Pod {
    /// The container that only holds the pod's namespaces.
    #[serde(rename = "InfraContainerID", default)]
    infra: String,
    #[serde(rename = "Containers", default)]
    containers: Vec<Member>,
}

impl Pod {
    /// The pod with this name or id.
    pub(crate) fn find(program: &Path, name: &str) -> Result<Self, Failure> {
        let said = ask(program, &["pod", "inspect", name])
            .map_err(|said| said.refused(&format!("podman knows no pod {name}")))?;
        Self::parse(&said)
            .with_context(|| format!("cannot read what podman says of the pod {name}"))
            .map_err(Into::into)
    }

    /// podman 5 says a list of pods, podman 4 one pod.
    fn parse(said: &str) -> anyhow::Result<Self> {
        match serde_json::from_str::<Vec<Self>>(said) {
            Ok(pods) => pods.into_iter().next().context("podman says nothing"),
            Err(_) => Ok(serde_json::from_str(said)?),
        }
    }

    /// The containers with programs.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Member> {
        self.containers.iter().filter(|it| it.id != self.infra)
    }

    /// Starts the container that holds the namespaces, if there is one and it does not run.
    pub(crate) fn start_infra(&self, program: &Path) -> Result<(), Failure> {
        let Some(infra) = self.containers.iter().find(|it| it.id == self.infra && !it.runs()) else { return Ok(()) };
        let started = ask(program, &["start", &infra.id]);
        started.map(drop).map_err(|said| said.failed("podman does not start the pod's infra container"))
    }
}

impl Member {
    /// Whether it has processes, be they paused.
    pub(crate) fn runs(&self) -> bool {
        matches!(self.state.as_str(), "running" | "paused")
    }
}

/// Whether a container is stopped, with a checkpoint in podman's storage.
pub(crate) fn is_checkpointed(program: &Path, name: &str) -> Result<bool, Failure> {
    let said = ask(program, &["container", "inspect", "--format", "{{.State.Checkpointed}}", name])
        .map_err(|said| said.refused(&format!("podman knows no container {name}")))?;
    Ok(said.trim() == "true")
}

/// The errors of a podman that has failed: those in CRIU's log, which runc and crun name, and its own.
pub(crate) fn errors(said: &[u8]) -> Vec<String> {
    let said = String::from_utf8_lossy(said);
    let log = said.split_whitespace().map(|word| word.trim_matches(|c: char| !c.is_alphanumeric() && c != '/'));
    let log = log.filter(|word| word.starts_with('/') && word.ends_with(".log")).find_map(|it| fs::read(it).ok());
    let mut errors = criu::errors(&String::from_utf8_lossy(&log.unwrap_or_default()));
    errors.extend(said.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned));
    errors
}

/// What podman says instead of an answer.
struct NoAnswer(anyhow::Error);

impl NoAnswer {
    /// It cannot be done.
    fn refused(self, what: &str) -> Failure {
        Failure::refused(self.0.context(what.to_owned()))
    }

    fn failed(self, what: &str) -> Failure {
        self.0.context(what.to_owned()).into()
    }
}

fn ask(program: &Path, arguments: &[&str]) -> Result<String, NoAnswer> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    let output = command.output().with_context(|| format!("cannot run {}", program.display())).map_err(NoAnswer)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(NoAnswer(anyhow!("{}", String::from_utf8_lossy(&output.stderr).trim().to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_has_its_containers_but_the_one_that_holds_its_namespaces() {
        let one = r#"{"Name": "p", "InfraContainerID": "a", "Containers": [
            {"Id": "a", "Name": "p-infra", "State": "running"}, {"Id": "b", "Name": "x", "State": "paused"},
            {"Id": "c", "Name": "y", "State": "exited"}]}"#;
        for said in [one.to_owned(), format!("[{one}]")] {
            let pod = Pod::parse(&said).unwrap();
            let members: Vec<_> = pod.members().map(|it| (it.name.as_str(), it.runs())).collect();
            assert_eq!(members, [("x", true), ("y", false)]);
        }
        assert_eq!(Pod::parse(r#"[{"Name": "p"}]"#).unwrap().members().count(), 0);
        assert!(Pod::parse("[]").is_err() && Pod::parse("Error").is_err());
    }

    #[test]
    fn what_criu_says_comes_before_what_podman_says() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("dump.log");
        fs::write(&log, "(00.2) Error (criu/tty.c:1): a\n").unwrap();
        let said = format!("criu failed: log file: {}\n\nError: exit status 1\n", log.display());
        let found = errors(said.as_bytes());
        assert_eq!((found[0].as_str(), found.len()), ("Error (criu/tty.c:1): a", 3));
        assert_eq!(errors(b"Error: no\n"), ["Error: no"]);
    }
}

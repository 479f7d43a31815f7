//! Pods, and what podman keeps: questions that only podman answers.

use anyhow::Context;
use serde::Deserialize;

use crate::engine::Engine;
use crate::failure::Failure;

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
    pub(crate) fn find(podman: &Engine, name: &str) -> Result<Self, Failure> {
        let said = podman
            .ask(&["pod", "inspect", name])
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
    pub(crate) fn start_infra(&self, podman: &Engine) -> Result<(), Failure> {
        let Some(infra) = self.containers.iter().find(|it| it.id == self.infra && !it.runs()) else { return Ok(()) };
        let started = podman.ask(&["start", &infra.id]);
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
pub(crate) fn is_checkpointed(podman: &Engine, name: &str) -> Result<bool, Failure> {
    let said = podman
        .ask(&["container", "inspect", "--format", "{{.State.Checkpointed}}", name])
        .map_err(|said| said.refused(&format!("podman knows no container {name}")))?;
    Ok(said.trim() == "true")
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
}

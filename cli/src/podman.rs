//! Pods, containers, and what podman keeps: questions that only podman answers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

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

/// A container, as podman describes it.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Container {
    pub(crate) id: String,
    pub(crate) name: String,
    /// The id of its image.
    pub(crate) image: String,
    pub(crate) image_name: String,
    /// The directory of what podman keeps of it.
    pub(crate) static_dir: PathBuf,
    /// The directory of which it was made, if that was no image.
    #[serde(default)]
    pub(crate) rootfs: String,
    #[serde(default)]
    pub(crate) pod: String,
    /// The containers without which it cannot run.
    #[serde(default)]
    pub(crate) dependencies: Vec<String>,
    #[serde(default)]
    mounts: Vec<Mount>,
    host_config: HostConfig,
    #[serde(default)]
    config: Config,
    #[serde(default)]
    network_settings: NetworkSettings,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Config {
    #[serde(default)]
    labels: Option<BTreeMap<String, String>>,
    /// What podman does with it when its health check fails.
    #[serde(default)]
    healthcheck_on_failure_action: Option<String>,
    #[serde(default)]
    startup_health_check: Option<StartupCheck>,
}

/// The health check of a container that starts.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct StartupCheck {
    /// After how many failures podman starts the container anew; 0: it never does.
    #[serde(default)]
    retries: u32,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct RestartPolicy {
    #[serde(default)]
    name: String,
    #[serde(default)]
    maximum_retry_count: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Mount {
    r#type: String,
    /// That of a volume.
    #[serde(default)]
    name: String,
    #[serde(default)]
    source: PathBuf,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HostConfig {
    #[serde(default)]
    network_mode: String,
    #[serde(default)]
    restart_policy: RestartPolicy,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct NetworkSettings {
    #[serde(default)]
    networks: Option<BTreeMap<String, serde_json::Value>>,
}

impl Container {
    /// The container with this name or id.
    pub(crate) fn find(podman: &Engine, name: &str) -> Result<Self, Failure> {
        let said = podman
            .ask(&["container", "inspect", name])
            .map_err(|said| said.refused(&format!("podman knows no container {name}")))?;
        let found = serde_json::from_str::<[Self; 1]>(&said);
        let [found] = found.with_context(|| format!("cannot read what podman says of container {name}"))?;
        Ok(found)
    }

    /// The names of its volumes.
    pub(crate) fn volumes(&self) -> impl Iterator<Item = &str> {
        self.mounts.iter().filter(|it| it.r#type == "volume").map(|it| it.name.as_str())
    }

    /// The files and directories of this host that it has.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.mounts.iter().filter(|it| it.r#type == "bind").map(|it| it.source.as_path())
    }

    /// The systemd unit that runs it, if one does.
    pub(crate) fn unit(&self) -> Option<&str> {
        self.config.labels.as_ref()?.get("PODMAN_SYSTEMD_UNIT").map(String::as_str)
    }

    /// What podman does that ends it when its health check fails, if it does such a thing.
    pub(crate) fn ends_when_unhealthy(&self) -> Option<&str> {
        let action = self.config.healthcheck_on_failure_action.as_deref()?;
        (!["", "none"].contains(&action)).then_some(action)
    }

    /// Whether podman starts it anew when the health check of its start fails.
    pub(crate) fn starts_anew_when_unhealthy(&self) -> bool {
        self.config.startup_health_check.as_ref().is_some_and(|it| it.retries > 0)
    }

    /// When podman starts it anew, as an option of podman's says it.
    pub(crate) fn restart_policy(&self) -> String {
        match &self.host_config.restart_policy {
            RestartPolicy { name, .. } if name.is_empty() => "no".to_owned(),
            RestartPolicy { name, maximum_retry_count: 0 } => name.clone(),
            RestartPolicy { name, maximum_retry_count } => format!("{name}:{maximum_retry_count}"),
        }
    }

    /// The names of podman's networks that it is in.
    pub(crate) fn networks(&self) -> Vec<String> {
        let is_in_some = self.host_config.network_mode == "bridge";
        let networks = self.network_settings.networks.iter().flatten().filter(|_| is_in_some);
        networks.map(|(name, _)| name.clone()).collect()
    }
}

/// The first process of a container; 0 if it has ended, or was not started yet. None if podman knows no such container.
pub(crate) fn pid(podman: &Engine, id: &str) -> Result<Option<i32>, Failure> {
    let filter = format!("id={id}");
    let known = podman.ask(&["ps", "--all", "--no-trunc", "--filter", &filter, "--format", "{{.ID}}"]);
    let known = known.map_err(|said| said.failed("podman does not list containers"))?;
    if !known.lines().any(|it| it.trim() == id) {
        return Ok(None);
    }
    let said = podman.ask(&["container", "inspect", "--format", "{{.State.Pid}}", id]);
    let said = said.map_err(|said| said.failed(&format!("podman says nothing of container {id}")))?;
    let pid =
        said.trim().parse().with_context(|| format!("podman says that container {id} has the process {said:?}"))?;
    Ok(Some(pid))
}

/// What podman knows of a container, whether it runs or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    /// Its first process; 0 if it does not run.
    pub(crate) pid: i32,
    /// Whether podman has made it, and it has never run.
    pub(crate) is_new: bool,
    /// The directory of what podman keeps of it.
    pub(crate) static_dir: PathBuf,
}

/// What podman knows of the container with this id, if it knows it.
pub(crate) fn known(podman: &Engine, id: &str) -> Result<Option<Known>, Failure> {
    if pid(podman, id)?.is_none() {
        return Ok(None);
    }
    let format = "{{.State.Pid}} {{.State.Status}} {{.StaticDir}}";
    let said = podman.ask(&["container", "inspect", "--format", format, id]);
    let said = said.map_err(|said| said.failed(&format!("podman says nothing of container {id}")))?;
    let known = Known::parse(&said).with_context(|| format!("podman says of container {id}: {said:?}"))?;
    Ok(Some(known))
}

impl Known {
    fn parse(said: &str) -> Option<Self> {
        let mut words = said.trim().splitn(3, ' ');
        let (pid, status, static_dir) = (words.next()?.parse().ok()?, words.next()?, words.next()?.into());
        Some(Self { pid, is_new: ["configured", "created", "initialized"].contains(&status), static_dir })
    }
}

/// Sets when podman starts a container anew.
pub(crate) fn set_restart(podman: &Engine, id: &str, policy: &str) -> Result<(), Failure> {
    let set = podman.ask(&["update", "--restart", policy, id]);
    set.map(drop).map_err(|said| said.failed(&format!("podman does not set the restart policy to {policy}")))
}

/// podman's version.
pub(crate) fn version(podman: &Engine) -> Result<String, Failure> {
    let said = podman.ask(&["version", "--format", "{{.Client.Version}}"]);
    said.map(|it| it.trim().to_owned()).map_err(|said| said.failed("podman does not say its version"))
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
    fn a_container_has_volumes_paths_and_networks() {
        let said = r#"{"Id": "a", "Name": "c", "Image": "b", "ImageName": "localhost/i:latest", "StaticDir": "/s", "Rootfs": "",
            "Mounts": [{"Type": "volume", "Name": "data", "Source": "/v/_data"}, {"Type": "bind", "Source": "/srv"}],
            "HostConfig": {"NetworkMode": "bridge"}, "NetworkSettings": {"Networks": {"podman": {}, "other": {}}}}"#;
        let found: Container = serde_json::from_str(said).unwrap();
        assert_eq!(found.volumes().collect::<Vec<_>>(), ["data"]);
        assert_eq!(found.paths().collect::<Vec<_>>(), [Path::new("/srv")]);
        assert_eq!(found.networks(), ["other", "podman"]);
        let policy = |policy: &str| {
            let said = said.replace(r#""NetworkMode""#, &format!(r#""RestartPolicy": {policy}, "NetworkMode""#));
            serde_json::from_str::<Container>(&said).unwrap().restart_policy()
        };
        assert_eq!(found.restart_policy(), "no");
        assert_eq!(policy(r#"{"Name": "", "MaximumRetryCount": 0}"#), "no");
        assert_eq!(policy(r#"{"Name": "always", "MaximumRetryCount": 0}"#), "always");
        assert_eq!(policy(r#"{"Name": "on-failure", "MaximumRetryCount": 3}"#), "on-failure:3");
        let alone: Container = serde_json::from_str(&said.replace("bridge", "none")).unwrap();
        assert!(alone.networks().is_empty());
    }

    #[test]
    fn a_container_that_has_never_run_is_new() {
        let is = |said: &str| Known::parse(said).map(|it| (it.pid, it.is_new, it.static_dir.display().to_string()));
        assert_eq!(is("0 created /a b/userdata\n"), Some((0, true, "/a b/userdata".to_owned())));
        assert_eq!(is("0 exited /a"), Some((0, false, "/a".to_owned())));
        assert_eq!(is("7 running /a"), Some((7, false, "/a".to_owned())));
        assert_eq!((is(""), is("7 running"), is("x running /a")), (None, None, None));
    }

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

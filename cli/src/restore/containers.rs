//! Restores of containers: their engine does them. podman does from archives that it has exported or from its own storage, Docker
//! and nerdctl from checkpoints that they keep under names.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, anyhow};
use serde_json::Value;

use super::options::Options;
use crate::engine::Engine;
use crate::failure::Failure;
use crate::{output, podman};

/// From what a container is restored.
#[derive(Debug)]
enum From {
    Archive(PathBuf),
    /// The checkpoint that the engine keeps for this container.
    Storage(String),
}

/// Containers that are to be restored.
pub(super) struct Containers<'a> {
    options: &'a Options,
    engine: Engine,
    from: Vec<From>,
}

impl<'a> Containers<'a> {
    /// The containers that the options mean, with these archives among the images. None if only directories are meant.
    pub(super) fn of(options: &'a Options, archives: &[PathBuf]) -> Result<Option<Self>, Failure> {
        let of = &options.containers;
        if archives.is_empty() && !of.is_used() {
            return Ok(None);
        }
        let given = archives.iter().chain(&of.import).map(|it| From::Archive(it.clone()));
        let mut from: Vec<_> = given.collect();
        let from_archives = !from.is_empty();
        from.extend(of.container.iter().map(|it| From::Storage(it.clone())));
        let engine = of.engine();
        of.check_engine(!archives.is_empty(), options.kept.options())?;
        if of.import_previous.is_some() {
            let why = "Rekindle's checkpoints need no earlier one of podman's: leave out --import-previous";
            return Err(Failure::refused(anyhow!(why)));
        }
        let of_criu = options.options_of_criu();
        if let Some(option) = of_criu.first() {
            let why = format!("{option} is for images in directories: {} does not pass it on to CRIU", of.engine);
            return Err(Failure::usage(anyhow!(why)));
        }
        if of.name.is_some() && (from.len() != 1 || !from_archives) {
            return Err(Failure::usage(anyhow!("--name is for one container that is restored from an archive")));
        }
        if !of.publish.is_empty() && (from.len() != 1 || !from_archives) {
            return Err(Failure::usage(anyhow!("--publish is for one container that is restored from an archive")));
        }
        match &of.pod {
            Some(_) if from_archives && !of.container.is_empty() => {
                return Err(Failure::usage(anyhow!(
                    "--pod is for archives, or for all containers of the pod: leave out --container"
                )));
            }
            Some(pod) if !from_archives && of.container.is_empty() => from = checkpointed(&engine, pod)?,
            Some(_) if !from_archives => {
                return Err(Failure::usage(anyhow!(
                    "a container that podman keeps is in its pod already: leave out --pod"
                )));
            }
            _ => {}
        }
        if from.is_empty() {
            return Err(Failure::usage(anyhow!("give an archive, --container or --pod")));
        }
        Ok(Some(Self { options, engine, from }))
    }

    /// Restores them: those of a pod at the same time, since they may wait for each other, and others one after the other. One
    /// that fails does not stop the others.
    pub(super) fn restore(&self, socket: &Path) -> Vec<(Value, Result<(), Failure>)> {
        if self.options.containers.pod.is_none() {
            return self.from.iter().map(|from| self.conclude(from, self.start(from, socket))).collect();
        }
        let started: Vec<_> = self.from.iter().map(|from| (from, self.start(from, socket))).collect();
        started.into_iter().map(|(from, child)| self.conclude(from, child)).collect()
    }

    fn start(&self, from: &From, socket: &Path) -> Result<Child, Failure> {
        let mut command = Command::new(&self.engine.program);
        match (&self.options.containers.checkpoint, from) {
            (Some(checkpoint), From::Storage(name)) => {
                // Otherwise the engine would say that it has started the container.
                if self.engine.runs(name)? {
                    let stop = format!("`{} stop {name}` first", self.engine.kind);
                    return Err(Failure::refused(anyhow!(
                        "container {name} runs, and a checkpoint is restored into a stopped one: {stop}"
                    )));
                }
                self.engine.tell_apart(name, checkpoint);
                command.args(["start", "--checkpoint", checkpoint]).args(&self.options.more).arg(name);
            }
            _ => {
                command.args(["container", "restore"]).args(self.arguments(from)).env("REKINDLE_SOCKET", socket);
            }
        }
        command.stdin(Engine::lock_on_stdin()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command.spawn().with_context(|| self.engine.no_program())?)
    }

    fn arguments(&self, from: &From) -> Vec<OsString> {
        let of = &self.options.containers;
        let from_archive = matches!(from, From::Archive(_));
        let flags = [
            ("--keep", of.keep),
            ("--print-stats", of.print_stats),
            ("--ignore-static-ip", of.ignore_static_ip),
            ("--ignore-static-mac", of.ignore_static_mac),
            ("--ignore-rootfs", of.ignore_rootfs),
            ("--ignore-volumes", of.ignore_volumes),
        ];
        let flags = flags.iter().filter(|(_, is_set)| *is_set).map(|(name, _)| *name);
        let mut all: Vec<OsString> = flags.chain(self.options.kept.options()).map(Into::into).collect();
        for (option, value) in [("--name", &of.name), ("--pod", &of.pod)] {
            if let Some(value) = value.as_ref().filter(|_| from_archive) {
                all.extend([option.into(), value.into()]);
            }
        }
        all.extend(of.publish.iter().flat_map(|it| ["--publish".into(), it.into()]));
        all.extend(self.options.more.iter().cloned());
        match from {
            From::Archive(file) => all.extend(["--import".into(), file.into()]),
            From::Storage(name) => all.push(name.into()),
        }
        all
    }

    /// Waits for the engine. podman tells the id of the container, or statistics.
    fn conclude(&self, from: &From, child: Result<Child, Failure>) -> (Value, Result<(), Failure>) {
        let mut report = match from {
            From::Archive(file) => serde_json::json!({ "image": file }),
            From::Storage(name) => serde_json::json!({ "container": name }),
        };
        let checkpoint = self.options.containers.checkpoint.as_deref();
        if let Some(checkpoint) = checkpoint {
            report["checkpoint"] = checkpoint.into();
        }
        let engine = self.engine.kind;
        let ended =
            child.and_then(|it| Ok(it.wait_with_output().with_context(|| format!("cannot wait for {engine}"))?));
        let failure = match ended {
            Ok(output) if output.status.success() => {
                let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
                report["outcome"] = "done".into();
                match serde_json::from_str::<Value>(&said) {
                    Ok(statistics) if statistics.is_object() => report["podman"] = statistics,
                    // Docker says the name that it was told.
                    _ if checkpoint.is_some() => {}
                    _ => report["id"] = said.into(),
                }
                return (report, Ok(()));
            }
            Ok(output) => {
                let errors = self.engine.errors(&output.stderr);
                let reason =
                    errors.first().cloned().unwrap_or_else(|| format!("{engine} ended with {}", output.status));
                report["reason"] = reason.as_str().into();
                report["errors"] = errors.into();
                anyhow!("cannot restore {}: {reason}", from.what()).into()
            }
            Err(failure) => {
                report["reason"] = failure.to_string().into();
                failure
            }
        };
        report["outcome"] = "failed".into();
        (report, Err(failure))
    }
}

/// What a report says to people.
pub(super) fn print(report: &Value) -> Result<(), Failure> {
    let text = |key: &str| report[key].as_str().map(output::plain);
    if report["outcome"] != "done" {
        let errors = report["errors"].as_array().into_iter().flatten().filter_map(Value::as_str);
        errors.skip(1).for_each(|it| eprintln!("  {}", output::plain(it)));
        return Ok(());
    }
    let what = match (text("container"), text("image"), text("id")) {
        (Some(name), ..) if report["checkpoint"].is_string() => {
            format!("restored container {name} from {}\n", text("checkpoint").unwrap_or_default())
        }
        (Some(name), ..) => format!("restored container {name}\n"),
        (_, Some(image), Some(id)) => {
            format!("restored container {} from {image}\n", id.chars().take(12).collect::<String>())
        }
        (_, Some(image), None) => format!("restored a container from {image}\n"),
        _ => "restored a container\n".to_owned(),
    };
    let statistics = Some(&report["podman"]).filter(|it| it.is_object());
    let statistics = statistics.and_then(|it| serde_json::to_string_pretty(it).ok()).map(|it| it + "\n");
    output::print(&(what + &statistics.unwrap_or_default()))?;
    Ok(())
}

impl From {
    fn what(&self) -> String {
        match self {
            Self::Archive(file) => format!("the archive {}", file.display()),
            Self::Storage(name) => format!("container {name}"),
        }
    }
}

/// The stopped containers of a pod that podman keeps a checkpoint of. The pod's namespaces exist afterwards.
fn checkpointed(podman: &Engine, name: &str) -> Result<Vec<From>, Failure> {
    let pod = podman::Pod::find(podman, name)?;
    let mut found = Vec::new();
    for member in pod.members().filter(|it| !it.runs()) {
        if podman::is_checkpointed(podman, &member.name)? {
            found.push(From::Storage(member.name.clone()));
        }
    }
    if found.is_empty() {
        let advice = "checkpoint it with --kill, or name its archives";
        return Err(Failure::refused(anyhow!(
            "podman keeps no checkpoint of a stopped container of the pod {name}: {advice}"
        )));
    }
    pod.start_infra(podman)?;
    Ok(found)
}

//! A container of podman's at the host that it goes to: what podman must have there, and its restore from the archive.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};

use super::talk::{ARCHIVE, Needs};
use crate::engine::Engine;
use crate::failure::Failure;
use crate::podman;

/// A container that is restored here.
#[derive(Debug)]
pub(super) struct Imported {
    engine: Engine,
    id: String,
}

impl Imported {
    pub(super) fn new(engine: &Engine, id: &str) -> Self {
        Self { engine: engine.clone(), id: id.to_owned() }
    }

    /// The command that restores it from the archive in the migration's directory.
    pub(super) fn restore(&self, dir: &Path, options: &[String]) -> Command {
        let mut command = Command::new(&self.engine.program);
        command.args(["container", "restore", "--ignore-volumes"]).args(options);
        command.arg("--import").arg(archive(dir));
        command
    }

    /// The errors in what podman has said.
    pub(super) fn errors(&self, said: &[u8]) -> Vec<String> {
        self.engine.errors(said)
    }

    /// Removes what podman and its runtime have made of it. Nothing of it runs: both refuse to remove a container that does. podman removes
    /// from its runtime only what has been created, so a podman that was killed before leaves the runtime with a container that
    /// stands in the way of the next restore.
    pub(super) fn remove(&self) -> Result<(), Failure> {
        let runtime = self.runtime()?;
        let removed = self.engine.ask(&["rm", "--ignore", &self.id]);
        removed.map_err(|said| said.failed(&format!("podman does not remove the copy of container {}", self.id)))?;
        // In most cases it knows no such container.
        let mut delete = Command::new(&runtime);
        delete.args(["delete", &self.id]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        delete.status().map(drop).with_context(|| format!("cannot run {runtime}"))?;
        Ok(())
    }

    /// The program of podman's runtime: the container's, if podman knows it.
    fn runtime(&self) -> Result<String, Failure> {
        let known = self.engine.ask(&["container", "inspect", "--format", "{{.OCIRuntime}}", &self.id]);
        let said = known.or_else(|_| self.engine.ask(&["info", "--format", "{{.Host.OCIRuntime.Path}}"]));
        said.map(|it| it.trim().to_owned()).map_err(|said| said.failed("podman does not say which runtime it uses"))
    }

    /// Whether podman knows that it runs.
    pub(super) fn is_known_to_run(&self) -> Result<bool, Failure> {
        Ok(podman::pid(&self.engine, &self.id)?.is_some_and(|pid| pid != 0))
    }
}

/// podman's archive among a migration's files.
pub(super) fn archive(dir: &Path) -> PathBuf {
    dir.join(ARCHIVE).join(ARCHIVE)
}

/// Whether this host's podman can take a container.
pub(super) fn compare(needs: &Needs, engine: &Engine) -> Result<(), Failure> {
    match lacks(needs, engine)? {
        Some(why) => Err(Failure::refused(anyhow!("container {} cannot go there: {why}", needs.name))),
        None => Ok(()),
    }
}

/// What stands in its way.
fn lacks(needs: &Needs, engine: &Engine) -> Result<Option<String>, Failure> {
    let Needs { id, name, podman, image, image_id, volumes, paths, networks } = needs;
    let version = podman::version(engine)?;
    if release(&version) != release(podman) {
        return Ok(Some(format!("podman's version is {version} there, and {podman} here")));
    }
    let list = |arguments: &[&str]| {
        let said = engine.ask(arguments).map_err(|said| said.failed("podman does not list what it has"))?;
        Ok::<_, Failure>(said.lines().map(str::to_owned).collect::<Vec<_>>())
    };
    let containers = list(&["ps", "--all", "--no-trunc", "--format", "{{.ID}} {{.Names}}"])?;
    if containers.iter().any(|it| it.split(' ').any(|word| word == id || word == name)) {
        return Ok(Some(format!("there is a container of the name {name} or of its id: remove or rename that one")));
    }
    match engine.ask(&["image", "inspect", "--format", "{{.Id}}", image]) {
        Ok(said) if said.trim() == image_id => {}
        Ok(_) => {
            return Ok(Some(format!("{image} is another image there: copy it by `podman image scp` or a registry")));
        }
        Err(_) => {
            return Ok(Some(format!("its image {image} is not there: copy it by `podman image scp` or a registry")));
        }
    }
    let has = list(&["volume", "ls", "--format", "{{.Name}}"])?;
    if let Some(volume) = volumes.iter().find(|it| !has.contains(it)) {
        return Ok(Some(format!("its volume {volume} is not there: make it, with the same content")));
    }
    let has = list(&["network", "ls", "--format", "{{.Name}}"])?;
    if let Some(network) = networks.iter().find(|it| !has.contains(it)) {
        return Ok(Some(format!("its network {network} is not there: make it by `podman network create`")));
    }
    Ok(paths.iter().find(|it| !it.exists()).map(|path| {
        format!("{}, which it has from the host, is not there: make it, with the same content", path.display())
    }))
}

/// The first two numbers of a version.
fn release(version: &str) -> Vec<&str> {
    version.split('.').take(2).collect()
}

//! A container of podman's at the host that it goes to: what podman must have there, and its restore from the archive.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};

use super::place::Place;
use super::talk::{ARCHIVE, Needs};
use crate::engine::Engine;
use crate::failure::Failure;
use crate::output;
use crate::podman::{self, Known};

/// How long a runtime may take to end that was left by a podman that was killed.
const RUNTIME_TAKES: Duration = Duration::from_secs(30);
/// The pause between two looks.
const PAUSE: Duration = Duration::from_millis(50);

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

    /// Removes what podman and its runtime have made of it for this migration, of which nothing runs. Another container may have its id,
    /// since it was brought here by another migration: that one is left. If `ended`, it has run, and has ended.
    ///
    /// podman removes from its runtime only what has been created, so a podman that was killed before leaves the runtime with a container
    /// that stands in the way of the next restore.
    pub(super) fn remove(&self, place: &Place, ended: bool) -> Result<(), Failure> {
        let known = podman::known(&self.engine, &self.id)?;
        if let Some(known) = known.filter(|it| !is_of(it, place, ended)) {
            let what = if known.pid == 0 { "has ended" } else { "runs" };
            output::warn(format_args!(
                "the container {} there {what}, is none of this migration, and is left as it is",
                self.id
            ));
            return Ok(());
        }
        let runtime = self.runtime()?;
        let removed = self.engine.ask(&["rm", "--ignore", &self.id]);
        removed.map_err(|said| said.failed(&format!("podman does not remove the copy of container {}", self.id)))?;
        self.forget_by(&runtime)?;
        Ok(())
    }

    /// Has the runtime forget it. In most cases it knows no such container. Where podman was killed, the runtime that it has started may
    /// end a little later.
    fn forget_by(&self, runtime: &str) -> Result<(), Failure> {
        let succeeds = |verb: &str| {
            let mut command = Command::new(runtime);
            command.args([verb, &self.id]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command.status().map(|it| it.success()).with_context(|| format!("cannot run {runtime}"))
        };
        let began = Instant::now();
        loop {
            succeeds("delete")?;
            if !succeeds("state")? {
                return Ok(());
            }
            if began.elapsed() > RUNTIME_TAKES {
                return Err(anyhow!(
                    "{runtime} does not delete the container {id}: end what it runs (`{runtime} kill {id} KILL`), and try again",
                    id = self.id
                )
                .into());
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// The program of podman's runtime: the container's, if podman knows it.
    fn runtime(&self) -> Result<String, Failure> {
        let known = self.engine.ask(&["container", "inspect", "--format", "{{.OCIRuntime}}", &self.id]);
        let said = known.or_else(|_| self.engine.ask(&["info", "--format", "{{.Host.OCIRuntime.Path}}"]));
        said.map(|it| it.trim().to_owned()).map_err(|said| said.failed("podman does not say which runtime it uses"))
    }

    /// The command that ends it where podman does not know that it runs.
    pub(super) fn end_command(&self) -> Result<String, Failure> {
        Ok(format!("{} kill {} KILL", self.runtime()?, self.id))
    }

    /// podman starts it anew when this policy says so, unless it knows it no more.
    pub(super) fn may_restart(&self, policy: &str) -> Result<(), Failure> {
        match podman::pid(&self.engine, &self.id)? {
            None => Ok(()),
            Some(_) => podman::set_restart(&self.engine, &self.id, policy),
        }
    }

    /// Whether podman knows that it runs.
    pub(super) fn is_known_to_run(&self) -> Result<bool, Failure> {
        Ok(podman::pid(&self.engine, &self.id)?.is_some_and(|pid| pid != 0))
    }
}

/// Whether a container is what this migration's restore has made of it: podman's images of it are the migration's until it runs. One that
/// has never run and has the same id, which is random, was made by a podman that did not come so far.
fn is_of(known: &Known, place: &Place, ended: bool) -> bool {
    known.pid == 0 && (ended || known.is_new || place.is_led_to(&known.static_dir))
}

/// podman's archive among a migration's files.
pub(super) fn archive(dir: &Path) -> PathBuf {
    dir.join(ARCHIVE).join(ARCHIVE)
}

/// Whether this host's podman can take a container. A migration to here that has the same container may wait to be settled.
pub(super) fn compare(needs: &Needs, engine: &Engine, waiting: Option<&str>) -> Result<(), Failure> {
    match lacks(needs, engine, waiting)? {
        Some(why) => Err(Failure::refused(anyhow!("container {} cannot go there: {why}", needs.name))),
        None => Ok(()),
    }
}

/// What to do about a container that stands in the way.
fn in_the_way(needs: &Needs, engine: &Engine) -> Result<String, Failure> {
    let Needs { id, name, .. } = needs;
    if podman::known(engine, id)?.is_some_and(|it| it.is_new) {
        return Ok(format!(
            "there is a copy of it that has never run, as a migration leaves that was not settled before that host has started anew: \
             `podman rm {id}` there removes it"
        ));
    }
    Ok(format!("there is a container of the name {name} or of its id: remove or rename that one"))
}

/// What stands in its way.
fn lacks(needs: &Needs, engine: &Engine, waiting: Option<&str>) -> Result<Option<String>, Failure> {
    let Needs { id, name, podman, image, image_id, volumes, paths, networks } = needs;
    let version = podman::version(engine)?;
    if release(&version) != release(podman) {
        return Ok(Some(format!("podman's version is {version} there, and {podman} here")));
    }
    let list = |arguments: &[&str]| {
        let said = engine.ask(arguments).map_err(|said| said.failed("podman does not list what it has"))?;
        Ok::<_, Failure>(said.lines().map(str::to_owned).collect::<Vec<_>>())
    };
    if let Some(migration) = waiting {
        return Ok(Some(format!(
            "a copy of it waits there since migration {migration}: settle that one first, on the host that it was started on (`rekindle \
             migrate --settle {migration}` and the name of that other host)"
        )));
    }
    let containers = list(&["ps", "--all", "--no-trunc", "--format", "{{.ID}} {{.Names}}"])?;
    if containers.iter().any(|it| it.split(' ').any(|word| word == id || word == name)) {
        return in_the_way(needs, engine).map(Some);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_migration_has_made_is_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::of("ab");
        let known = |pid, is_new| Known { pid, is_new, static_dir: dir.path().to_owned() };
        assert!(is_of(&known(0, true), &place, false), "podman was killed early");
        assert!(!is_of(&known(0, false), &place, false), "another has ended");
        assert!(is_of(&known(0, false), &place, true), "it has ended");
        std::os::unix::fs::symlink(place.path("last-ab"), dir.path().join("checkpoint")).unwrap();
        assert!(is_of(&known(0, false), &place, false));
        for ended in [false, true] {
            assert!(!is_of(&known(7, false), &place, ended), "it runs");
        }
    }
}

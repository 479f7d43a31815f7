//! A container of podman's that is migrated, at the host that it comes from.
//!
//! `podman container checkpoint --leave-running --export` dumps it. From the end of the dump on the container stands still, which is
//! the daemon's work: so what podman puts into its archive afterwards fits, and the container goes on at once if anything fails. It
//! is removed when it runs on the other host, as `podman rm` does, and its volumes stay.
//!
//! Others may start a container, too. Those that would start it anew while it stands still are refused beforehand: a systemd unit, and a
//! health check that ends it. A restart policy is set to `no` before the container is handed over, since podman would start it anew with
//! the machine. podman's archive has the policy as it was, and so has the note, for a container that stays after all.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};
use rekindle_wire::control::MigrationState;
use serde::{Deserialize, Serialize};

use super::freezer;
use super::place::Place;
use super::settle;
use super::talk::Needs;
use crate::criu::Keep;
use crate::engine::Engine;
use crate::failure::Failure;
use crate::podman;
use crate::process;

/// podman's name of the directory with CRIU's images.
const CHECKPOINT: &str = "checkpoint";
/// podman's name of the restart policy by which nothing is started anew.
const NO_RESTART: &str = "no";

/// A container that is migrated.
#[derive(Debug)]
pub(super) struct Container {
    engine: Engine,
    found: podman::Container,
    place: Place,
    note: Note,
}

/// What whoever finishes the migration must know of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Note {
    podman: PathBuf,
    id: String,
    name: String,
    static_dir: PathBuf,
    /// Its first process, and when that started: a later container of the same id has another.
    pid: i32,
    start: u64,
    /// Its cgroup.
    cgroup: PathBuf,
    /// Its restart policy, once that was set to `no`.
    #[serde(default)]
    restart: Option<String>,
}

impl Container {
    /// The container of this name, and its first process. Refuses one that podman cannot restore elsewhere, or that others than podman's
    /// user may start anew.
    pub(super) fn find(engine: Engine, name: &str, migration: &str) -> Result<(Self, i32), Failure> {
        let pid = engine.pid(name)?;
        let found = podman::Container::find(&engine, name)?;
        let refused = |why: &str| Failure::refused(anyhow!("container {name} cannot be migrated: {why}"));
        if let Some(why) = obstacle(&found) {
            return Err(refused(&why));
        }
        let start = process::start_of(pid).ok_or_else(|| refused("it has just ended"))?;
        let cgroup = freezer::of(pid, &found.id).ok_or_else(|| {
            refused(
                "it has no cgroup of its own that can be frozen, as cgroups of version 2 can (podman run --cgroups)",
            )
        })?;
        let note = Note {
            podman: engine.program.clone(),
            id: found.id.clone(),
            name: found.name.clone(),
            static_dir: found.static_dir.clone(),
            pid,
            start,
            cgroup,
            restart: None,
        };
        Ok((Self { engine, found, place: Place::of(migration), note }, pid))
    }

    /// The container's name.
    pub(super) fn name(&self) -> &str {
        &self.found.name
    }

    /// The container's id.
    pub(super) fn id(&self) -> &str {
        &self.found.id
    }

    /// What the other host must have, and what it must not have.
    pub(super) fn needs(&self) -> Result<Needs, Failure> {
        let podman::Container { id, name, image, image_name, .. } = &self.found;
        Ok(Needs {
            id: id.clone(),
            name: name.clone(),
            podman: podman::version(&self.engine)?,
            image: image_name.clone(),
            image_id: image.clone(),
            volumes: self.found.volumes().map(str::to_owned).collect(),
            paths: self.found.paths().map(Path::to_owned).collect(),
            networks: self.found.networks(),
        })
    }

    /// Has podman's checkpoint of the container go to the directory `last` of the migration's, which is open. The link leads nowhere when
    /// this process has ended, also if another one has its number then: no other checkpoint builds on images there, which have lost their
    /// content. So the name `last` must be this migration's alone.
    pub(super) fn link(&self, dir: &File, last: &str) -> Result<(), Failure> {
        let dir = format!("/proc/{}/fd/{}", std::process::id(), dir.as_raw_fd());
        self.place.make(Path::new(&dir))?;
        self.place.write(&self.note)?;
        let checkpoint = self.note.static_dir.join(CHECKPOINT);
        let linked = || -> io::Result<()> {
            // What an earlier checkpoint has left there, podman would overwrite.
            match fs::symlink_metadata(&checkpoint) {
                Ok(it) if it.is_dir() => fs::remove_dir_all(&checkpoint)?,
                Ok(_) => fs::remove_file(&checkpoint)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            symlink(self.place.path(last), &checkpoint)
        };
        Ok(linked().with_context(|| format!("cannot make {}", checkpoint.display()))?)
    }

    /// The command that checkpoints it into the linked directory, and the rest of it into an archive.
    pub(super) fn checkpoint(&self, archive: &Path, kept: Keep) -> Command {
        let mut command = Command::new(&self.engine.program);
        command.args(["container", "checkpoint", "--leave-running", "--ignore-volumes", "--compress", "none"]);
        command.args(kept.options()).arg("--export").arg(archive).arg(&self.found.id);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    /// The errors in what podman has said.
    pub(super) fn errors(&self, said: &[u8]) -> Vec<String> {
        self.engine.errors(said)
    }

    /// podman has done its part, or will not: its next checkpoint of the container goes where its checkpoints go.
    pub(super) fn unlink(&self) {
        self.note.unlink(&self.place);
    }

    /// podman does not start it anew here any more, whatever ends it. It stands still by now.
    pub(super) fn forbid_restart(&mut self) -> Result<(), Failure> {
        let policy = self.found.restart_policy();
        if policy == NO_RESTART {
            return Ok(());
        }
        self.note.restart = Some(policy);
        self.place.write(&self.note)?;
        set_restart(&self.engine, &self.note.id, NO_RESTART)
            .map_err(|failure| failure.but("its restart policy cannot be set to `no`".to_owned()))
    }

    /// The container was handed over: no signal lets it run here any more.
    pub(super) fn freeze(&self) {
        self.note.freeze();
    }

    /// The container goes on here: nothing of its migration is left.
    pub(super) fn stays(&self) {
        if let Err(failure) = self.note.stays(&self.place) {
            eprintln!("rekindle: {failure}");
        }
    }

    /// The container runs elsewhere: removes it here.
    pub(super) fn remove(&self) -> Result<(), Failure> {
        let Some(_lock) = self.place.lock()? else { return Ok(()) };
        self.note.remove(&self.place)
    }
}

/// Why a container cannot be migrated, if it cannot.
fn obstacle(found: &podman::Container) -> Option<String> {
    let advice = |option: &str, value: &str| format!("`podman update {option} {value} {}` first", found.name);
    if !found.pod.is_empty() {
        return Some("it belongs to a pod, and would move without the others".to_owned());
    }
    if !found.dependencies.is_empty() {
        return Some("it shares a namespace with another container".to_owned());
    }
    if !found.rootfs.is_empty() {
        return Some(
            "it was made of a directory (--rootfs), and podman restores only containers of images elsewhere".to_owned(),
        );
    }
    if let Some(unit) = found.unit() {
        return Some(format!(
            "the systemd unit {unit} runs it, and would start it anew here as soon as it has gone: run it without a unit"
        ));
    }
    found.ends_when_unhealthy().map(|action| {
        format!(
            "its health check ends it when it fails (--health-on-failure={action}), as it does while the container stands still: {}",
            advice("--health-on-failure", "none")
        )
    })
}

impl Note {
    fn of(place: &Place) -> Option<Self> {
        serde_json::from_slice(&place.noted()?).ok()
    }

    fn engine(&self) -> Engine {
        Engine::podman(Some(&self.podman))
    }

    fn unlink(&self, place: &Place) {
        let checkpoint = self.static_dir.join(CHECKPOINT);
        let is_ours = |link: PathBuf| link.parent() == place.path("x").parent();
        if fs::read_link(&checkpoint).is_ok_and(is_ours) {
            let _ = fs::remove_file(checkpoint);
        }
    }

    /// Whether a process is the first one of the container that was dumped.
    fn is_of(&self, pid: i32) -> bool {
        pid == self.pid && process::start_of(pid) == Some(self.start)
    }

    fn freeze(&self) {
        // A later container of the same id has a cgroup of the same name.
        if self.is_of(self.pid)
            && let Err(error) = freezer::freeze(&self.cgroup)
        {
            eprintln!(
                "rekindle: cannot freeze {}: {error}; container {} stands still only until somebody sends it SIGCONT",
                self.cgroup.display(),
                self.name
            );
        }
    }

    fn stays(&self, place: &Place) -> Result<(), Failure> {
        let Some(_lock) = place.lock()? else { return Ok(()) };
        self.unlink(place);
        // A newer note knows of a policy that was changed.
        let note = Self::of(place).unwrap_or_else(|| self.clone());
        if let Some(policy) = &note.restart {
            set_restart(&self.engine(), &self.id, policy).map_err(|failure| {
                let by = format!("{} update --restart {policy} {}", self.podman.display(), self.id);
                failure.but(format!("container {} goes on here without its restart policy: `{by}` sets it", self.name))
            })?;
        }
        place.remove();
        Ok(())
    }

    /// Removes the container that was dumped, and no other that has its id by now.
    fn remove(&self, place: &Place) -> Result<(), Failure> {
        let (engine, name, id) = (self.engine(), &self.name, &self.id);
        let podman = self.podman.display();
        match podman::pid(&engine, id)? {
            None => {}
            Some(pid) if self.is_of(pid) => {
                let removed = engine.ask(&["rm", "--force", "--ignore", "--time", "0", id]);
                removed.map_err(|said| {
                    said.failed(&format!(
                        "podman does not remove container {name}, which stands still here: `{podman} rm --force {id}`"
                    ))
                })?;
            }
            Some(0) => eprintln!(
                "rekindle: container {name} has ended here, and is left: `{podman} rm {id}` removes it, and with it what it has written"
            ),
            Some(_) => eprintln!("rekindle: container {name} runs here since its migration, and is left as it is"),
        }
        place.remove();
        Ok(())
    }
}

/// The container of a migration from here was handed over: no signal lets it run here any more, if it still stands still here.
pub(super) fn freeze(migration: &str) {
    if let Some(note) = Note::of(&Place::of(migration)) {
        note.freeze();
    }
}

/// The end of a migration at the source, whose command has ended before it was over: the container is removed if it goes on
/// elsewhere. None of that concerns a migration of a process.
pub(super) fn settle(migration: &str, moved: bool) -> Result<(), Failure> {
    let place = Place::of(migration);
    if !moved {
        return Note::of(&place).map_or(Ok(()), |note| note.stays(&place));
    }
    let Some(_lock) = place.lock()? else { return Ok(()) };
    // Somebody else may have settled it meanwhile.
    let Some(note) = Note::of(&place) else { return Ok(()) };
    note.unlink(&place);
    note.remove(&place)
}

/// Ends what commands have left that were killed, where it is known how. What was handed over stays, for whoever settles it.
pub(super) fn sweep(socket: &Path) {
    for migration in Place::all() {
        let place = Place::of(&migration);
        let Some(note) = Note::of(&place) else {
            place.remove_if_left();
            continue;
        };
        let swept = match settle::decision(socket, &migration) {
            Ok(MigrationState::Kept) => note.stays(&place),
            // podman's next checkpoint of the container goes where its checkpoints go.
            Ok(MigrationState::HandedOver | MigrationState::Unknown) => {
                note.unlink(&place);
                Ok(())
            }
            // Its command lives, or nobody knows.
            Ok(MigrationState::Undecided) | Err(_) => Ok(()),
        };
        if let Err(failure) = swept {
            eprintln!("rekindle: {failure}");
        }
    }
}

fn set_restart(engine: &Engine, id: &str, policy: &str) -> Result<(), Failure> {
    let set = engine.ask(&["update", "--restart", policy, id]);
    set.map(drop).map_err(|said| said.failed(&format!("podman does not set the restart policy to {policy}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(more: &str) -> podman::Container {
        let said = format!(
            r#"{{"Id": "a", "Name": "c", "Image": "b", "ImageName": "i", "StaticDir": "/s", "HostConfig": {{}} {more}}}"#
        );
        serde_json::from_str(&said).unwrap()
    }

    #[test]
    fn what_others_would_start_anew_is_refused() {
        assert_eq!(obstacle(&container("")), None);
        for (more, why) in [
            (r#", "Pod": "p""#, "belongs to a pod"),
            (r#", "Dependencies": ["b"]"#, "shares a namespace"),
            (r#", "Rootfs": "/r""#, "--rootfs"),
            (r#", "Config": {"Labels": {"PODMAN_SYSTEMD_UNIT": "job.service"}}"#, "unit job.service"),
            (r#", "Config": {"HealthcheckOnFailureAction": "restart"}"#, "podman update --health-on-failure none c"),
        ] {
            let said = obstacle(&container(more)).unwrap_or_default();
            assert!(said.contains(why), "{more}: {said}");
        }
        for more in [r#""Labels": null"#, r#""HealthcheckOnFailureAction": "none", "Labels": {"a": "b"}"#] {
            assert_eq!(obstacle(&container(&format!(r#", "Config": {{{more}}}"#))), None, "{more}");
        }
    }

    #[test]
    fn a_container_of_the_same_id_is_told_from_the_one_that_was_dumped() {
        let own = std::process::id() as i32;
        let note = Note {
            podman: "podman".into(),
            id: "a".into(),
            name: "c".into(),
            static_dir: "/s".into(),
            pid: own,
            start: process::start_of(own).unwrap(),
            cgroup: "/c".into(),
            restart: None,
        };
        assert!(note.is_of(own) && !note.is_of(1));
        let later = Note { start: note.start + 1, ..note };
        assert!(!later.is_of(own));
    }
}

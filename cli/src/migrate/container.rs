//! A container of podman's that is migrated, at the host that it comes from.
//!
//! `podman container checkpoint --leave-running --export` dumps it. From the end of the dump on the container stands still, which is
//! the daemon's work: so what podman puts into its archive afterwards fits, and the container goes on at once if anything fails. It
//! is removed when it runs on the other host, as `podman rm` does, and its volumes stay.
//!
//! Others may start a container, too. Those that would start it anew while it stands still are refused beforehand: a systemd unit, and a
//! health check that ends it. A restart policy is set to `no` before the checkpoint, since podman would start the container anew with
//! the machine, here and where a copy of it waits. The note has the policy as it was, for a container that stays after all, and the other
//! host hears it.

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
use super::place::{CHECKPOINT, Place};
use super::settle;
use super::talk::Needs;
use crate::criu::Keep;
use crate::engine::Engine;
use crate::failure::Failure;
use crate::{output, podman, process};

/// The name of that directory of an earlier checkpoint, while a link has its place.
const EARLIER: &str = "checkpoint.before-migration";
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
    /// The socket of the daemon that decides: of several on a host, each ends its own migrations.
    socket: PathBuf,
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
    /// Whether the cgroup may be frozen.
    #[serde(default)]
    frozen: bool,
}

impl Container {
    /// The container of this name, and its first process. Refuses one that podman cannot restore elsewhere, or that others than podman's
    /// user may start anew.
    pub(super) fn find(engine: Engine, name: &str, migration: &str, socket: &Path) -> Result<(Self, i32), Failure> {
        let pid = engine.pid(name)?;
        let found = podman::Container::find(&engine, name)?;
        let refused = |why: &str| Failure::refused(anyhow!("container {name} cannot be migrated: {why}"));
        if let Some(why) = obstacle(&found) {
            return Err(refused(&why));
        }
        if found.restart_policy() != NO_RESTART {
            let version = podman::version(&engine)?;
            if !sets_restart(&version) {
                return Err(refused(&format!(
                    "its restart policy must be set to `no` meanwhile, and podman {version} cannot, as podman 5.1 can (podman update --restart)"
                )));
            }
        }
        let start = process::start_of(pid).ok_or_else(|| refused("it has just ended"))?;
        let cgroup = freezer::of(pid, &found.id).ok_or_else(|| {
            refused(
                "it has no cgroup of its own that can be frozen, as cgroups of version 2 can (podman run --cgroups)",
            )
        })?;
        let note = Note {
            socket: socket_of(socket)?,
            podman: engine.program.clone(),
            id: found.id.clone(),
            name: found.name.clone(),
            static_dir: found.static_dir.clone(),
            pid,
            start,
            cgroup,
            restart: None,
            frozen: false,
        };
        let container = Self { engine, found, place: Place::of(migration), note };
        container.is_alone()?;
        Ok((container, pid))
    }

    /// Refuses a container in which others have started processes that the dump does not have: they would go on, or be lost with it.
    pub(super) fn is_alone(&self) -> Result<(), Failure> {
        let Note { name, pid, cgroup, .. } = &self.note;
        let strangers = freezer::strangers(cgroup, *pid);
        let strangers = strangers.with_context(|| format!("cannot list the processes of container {name}"))?;
        if strangers.is_empty() {
            return Ok(());
        }
        let strangers = strangers.iter().map(i32::to_string).collect::<Vec<_>>().join(", ");
        Err(Failure::refused(anyhow!(
            "container {name} cannot be migrated: processes run in it that do not descend from its first one, as by `podman exec` or a \
             health check, and that would be lost ({strangers}): end them, or try again when they have ended"
        )))
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
        // Whoever sweeps meanwhile leaves a place that is empty, or whose note is of a command that lives or of another daemon.
        self.place.create().with_context(|| format!("cannot make a place for container {}", self.note.name))?;
        self.place.write(&self.note)?;
        self.place.make(Path::new(&dir))?;
        let checkpoint = self.note.static_dir.join(CHECKPOINT);
        let linked = || -> io::Result<()> {
            // What an earlier checkpoint has left there may be needed if the container stays.
            match fs::symlink_metadata(&checkpoint) {
                Ok(it) if it.is_dir() => {
                    let earlier = self.note.static_dir.join(EARLIER);
                    // An older one is of a migration that was cut off.
                    if earlier.exists() {
                        fs::remove_dir_all(&earlier)?;
                    }
                    fs::rename(&checkpoint, earlier)?;
                }
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

    /// podman does not start it anew any more, whatever ends it: here, and where it finds the archive of a checkpoint that follows.
    pub(super) fn forbid_restart(&mut self) -> Result<(), Failure> {
        let policy = self.found.restart_policy();
        if policy == NO_RESTART {
            return Ok(());
        }
        self.note.restart = Some(policy);
        self.place.write(&self.note)?;
        podman::set_restart(&self.engine, &self.note.id, NO_RESTART)
            .map_err(|failure| failure.but("its restart policy cannot be set to `no`".to_owned()))
    }

    /// Its restart policy, if that was set to `no`.
    pub(super) fn restart_policy(&self) -> Option<&str> {
        self.note.restart.as_deref()
    }

    /// The container was handed over: no signal lets it run here any more.
    pub(super) fn freeze(&self) -> Result<(), Failure> {
        self.note.freeze(&self.place)
    }

    /// The container goes on here: nothing of its migration is left.
    pub(super) fn stays(&self) {
        if let Err(failure) = self.note.stays(&self.place) {
            output::warn(failure);
        }
    }

    /// The container runs elsewhere: removes it here.
    pub(super) fn remove(&self) -> Result<(), Failure> {
        let Some(_lock) = self.place.lock()? else { return Ok(()) };
        self.note.remove(&self.place)
    }
}

/// A daemon's socket, however it was named.
fn socket_of(socket: &Path) -> Result<PathBuf, Failure> {
    Ok(fs::canonicalize(socket).with_context(|| format!("cannot find {}", socket.display()))?)
}

/// Whether a podman of this version can set the restart policy of a container.
fn sets_restart(version: &str) -> bool {
    let mut numbers = version.split('.').map(|it| it.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (5, 1)
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
    if found.starts_anew_when_unhealthy() {
        return Some(format!(
            "podman starts it anew when the health check of its start has failed some times (--health-startup-retries), as it may while \
             the container stands still: {}",
            advice("--health-startup-retries", "0")
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

    /// The command that removes it here.
    fn removal(&self) -> String {
        format!("{} rm --force {}", self.podman.display(), self.id)
    }

    fn unlink(&self, place: &Place) {
        let checkpoint = self.static_dir.join(CHECKPOINT);
        if place.is_led_to(&self.static_dir) {
            let _ = fs::remove_file(&checkpoint);
        }
        if fs::symlink_metadata(&checkpoint).is_err() {
            let _ = fs::rename(self.static_dir.join(EARLIER), checkpoint);
        }
    }

    /// Whether a process is the first one of the container that was dumped.
    fn is_of(&self, pid: i32) -> bool {
        pid == self.pid && process::start_of(pid) == Some(self.start)
    }

    fn freeze(&self, place: &Place) -> Result<(), Failure> {
        // A later container of the same id has a cgroup of the same name.
        if !self.is_of(self.pid) {
            return Ok(());
        }
        place.write(&Self { frozen: true, ..self.clone() })?;
        if let Err(error) = freezer::freeze(&self.cgroup) {
            return Err(anyhow!(
                "container {} was handed over, and {} cannot be frozen: {error}; as long as SIGCONT could let it run here, the other host \
                 is not told",
                self.name,
                self.cgroup.display()
            )
            .into());
        }
        Ok(())
    }

    fn stays(&self, place: &Place) -> Result<(), Failure> {
        let Some(_lock) = place.lock()? else { return Ok(()) };
        self.unlink(place);
        // A newer note knows of a policy that was changed.
        let note = Self::of(place).unwrap_or_else(|| self.clone());
        if note.frozen && self.is_of(self.pid) {
            let thawed = freezer::thaw(&self.cgroup);
            thawed.with_context(|| {
                format!("container {} goes on here, and {} cannot be thawed", self.name, self.cgroup.display())
            })?;
        }
        // It may have ended and gone meanwhile.
        if let Some(policy) = &note.restart
            && podman::pid(&self.engine(), &self.id)?.is_some()
        {
            podman::set_restart(&self.engine(), &self.id, policy).map_err(|failure| {
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
            Some(0) => output::warn(format_args!(
                "container {name} has ended here, and is left: `{podman} rm {id}` removes it, and with it what it has written"
            )),
            Some(_) => {
                output::warn(format_args!("container {name} runs here since its migration, and is left as it is"))
            }
        }
        place.remove();
        Ok(())
    }
}

/// The container of a migration from here was handed over: no signal lets it run here any more, if it still stands still here.
pub(super) fn freeze(migration: &str) -> Result<(), Failure> {
    let place = Place::of(migration);
    Note::of(&place).map_or(Ok(()), |note| note.freeze(&place))
}

/// The id of the container of a migration from here, if it was one and is not over.
pub(super) fn id(migration: &str) -> Option<String> {
    Note::of(&Place::of(migration)).map(|it| it.id)
}

/// The socket of the daemon that has decided about such a migration.
pub(super) fn daemon_of(migration: &str) -> Option<PathBuf> {
    Note::of(&Place::of(migration)).map(|it| it.socket)
}

/// The command that removes the container of such a migration.
pub(super) fn removal(migration: &str) -> Option<String> {
    Note::of(&Place::of(migration)).map(|it| it.removal())
}

/// Whether podman does not know the container of such a migration any more.
pub(super) fn is_gone(migration: &str) -> Result<bool, Failure> {
    match Note::of(&Place::of(migration)) {
        Some(note) => Ok(podman::pid(&note.engine(), &note.id)?.is_none()),
        None => Ok(false),
    }
}

/// A container that was handed over, and runs here all the same, since somebody has started it anew: its name, and how to remove it.
pub(super) fn started_anew(migration: &str) -> Result<Option<(String, String)>, Failure> {
    let Some(note) = Note::of(&Place::of(migration)) else { return Ok(None) };
    let pid = podman::pid(&note.engine(), &note.id)?;
    let is_another = pid.is_some_and(|pid| pid != 0 && !note.is_of(pid));
    Ok(is_another.then(|| (note.name.clone(), note.removal())))
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

/// Ends what commands have left that were killed, where it is known how. What was handed over stays, for whoever settles it. Another
/// daemon's migrations stay as they are: this one knows none of them.
pub(super) fn sweep(socket: &Path) {
    let Ok(own) = socket_of(socket) else { return };
    for migration in Place::all() {
        let place = Place::of(&migration);
        let Some(note) = Note::of(&place) else {
            place.remove_if_left();
            continue;
        };
        if note.socket != own {
            continue;
        }
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
            output::warn(failure);
        }
    }
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
            (r#", "Config": {"StartupHealthCheck": {"Retries": 2}}"#, "podman update --health-startup-retries 0 c"),
        ] {
            let said = obstacle(&container(more)).unwrap_or_default();
            assert!(said.contains(why), "{more}: {said}");
        }
        for more in [
            r#""StartupHealthCheck": {"Test": ["a"]}"#,
            r#""Labels": null"#,
            r#""HealthcheckOnFailureAction": "none", "Labels": {"a": "b"}"#,
        ] {
            assert_eq!(obstacle(&container(&format!(r#", "Config": {{{more}}}"#))), None, "{more}");
        }
    }

    #[test]
    fn podman_sets_restart_policies_from_version_5_1_on() {
        let versions = ["4.9.3", "5.0.3", "5.1.0-rc1", "5.4.2", "6.0.0", ""];
        assert_eq!(versions.map(sets_restart), [false, false, true, true, true, false]);
    }

    #[test]
    fn a_container_of_the_same_id_is_told_from_the_one_that_was_dumped() {
        let own = std::process::id() as i32;
        let note = Note {
            socket: "/run/rekindle/rekindled.sock".into(),
            podman: "podman".into(),
            id: "a".into(),
            name: "c".into(),
            static_dir: "/s".into(),
            pid: own,
            start: process::start_of(own).unwrap(),
            cgroup: "/c".into(),
            restart: None,
            frozen: false,
        };
        assert!(note.is_of(own) && !note.is_of(1));
        let later = Note { start: note.start + 1, ..note };
        assert!(!later.is_of(own));
    }
    /// The note of a container that has ended.
    fn note(static_dir: PathBuf, podman: PathBuf) -> Note {
        let (id, name, restart) = ("a".to_owned(), "c".to_owned(), Some("always".to_owned()));
        let socket = "/run/rekindle/rekindled.sock".into();
        Note { socket, podman, id, name, static_dir, pid: -1, start: 0, cgroup: "/c".into(), restart, frozen: true }
    }

    /// A podman that knows these containers, and updates none.
    fn podman_with(dir: &Path, containers: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let program = dir.join("podman");
        let script =
            format!("#!/bin/sh\ncase $1 in ps) echo '{containers}' ;; container) echo 0 ;; *) exit 1 ;; esac\n");
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        program
    }

    #[test]
    fn a_migration_of_a_container_that_has_gone_is_over() {
        for (known, is_over) in [("b", true), ("a", false)] {
            let dir = tempfile::tempdir().unwrap();
            let place = Place::at(&dir.path().join("place"));
            place.make(dir.path()).unwrap();
            let note = note(dir.path().to_owned(), podman_with(dir.path(), known));
            place.write(&note).unwrap();
            assert_eq!((note.stays(&place).is_ok(), place.noted().is_none()), (is_over, is_over), "{known}");
        }
    }
    #[test]
    fn an_earlier_checkpoint_is_there_again_when_the_link_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::at(&dir.path().join("place"));
        let (checkpoint, static_dir) = (dir.path().join(CHECKPOINT), dir.path().to_owned());
        let note = note(static_dir, "podman".into());
        let engine = note.engine();
        let found = container("");
        let container = Container { engine, found, place, note };
        for has_earlier in [false, true, true] {
            if has_earlier {
                fs::create_dir_all(checkpoint.join("images")).unwrap();
            }
            container.link(&File::open(dir.path()).unwrap(), "last-ab").unwrap();
            assert!(checkpoint.is_symlink());
            container.unlink();
            container.unlink();
            assert_eq!(checkpoint.join("images").exists(), has_earlier);
            assert!(has_earlier || !checkpoint.is_symlink());
        }
    }
}

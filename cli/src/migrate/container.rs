//! A container of podman's that is migrated, at the host that it comes from.
//!
//! `podman container checkpoint --leave-running --export` dumps it. From the end of the dump on the container stands still, which is
//! the daemon's work: so what podman puts into its archive afterwards fits, and the container goes on at once if anything fails. It
//! is removed when it runs on the other host, as `podman rm` does, and its volumes stay.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};
use serde::{Deserialize, Serialize};

use super::place::Place;
use super::talk::Needs;
use crate::criu::Keep;
use crate::engine::Engine;
use crate::failure::Failure;
use crate::podman;

/// podman's name of the directory with CRIU's images.
const CHECKPOINT: &str = "checkpoint";

/// A container that is migrated.
#[derive(Debug)]
pub(super) struct Container {
    engine: Engine,
    found: podman::Container,
    place: Place,
}

/// What whoever finishes the migration must know of it.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    podman: PathBuf,
    id: String,
    name: String,
    static_dir: PathBuf,
}

impl Container {
    /// The container of this name, and its first process. Refuses one that podman cannot restore elsewhere.
    pub(super) fn find(engine: Engine, name: &str, migration: &str) -> Result<(Self, i32), Failure> {
        let pid = engine.pid(name)?;
        let found = podman::Container::find(&engine, name)?;
        let refused = |why: &str| Err(Failure::refused(anyhow!("container {name} cannot be migrated: {why}")));
        if !found.pod.is_empty() {
            return refused("it belongs to a pod, and would move without the others");
        }
        if !found.dependencies.is_empty() {
            return refused("it shares a namespace with another container");
        }
        if !found.rootfs.is_empty() {
            return refused(
                "it was made of a directory (--rootfs), and podman restores only containers of images elsewhere",
            );
        }
        Ok((Self { engine, found, place: Place::of(migration) }, pid))
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

    /// Has podman's checkpoint of the container go to the migration's directory, which is open. The link leads nowhere when this process
    /// has ended: no other checkpoint builds on images there, which have lost their content.
    pub(super) fn link(&self, dir: &File, last: &str) -> Result<(), Failure> {
        let podman::Container { id, name, static_dir, .. } = &self.found;
        let (podman, id) = (self.engine.program.clone(), id.clone());
        let note = Note { podman, id, name: name.clone(), static_dir: static_dir.clone() };
        let dir = format!("/proc/{}/fd/{}", std::process::id(), dir.as_raw_fd());
        self.place.make(Path::new(&dir))?;
        self.place.note(&serde_json::to_vec(&note).context("cannot write JSON")?)?;
        let checkpoint = static_dir.join(CHECKPOINT);
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
        unlink(&self.found.static_dir, &self.place);
    }

    /// The container goes on here: nothing of its migration is left.
    pub(super) fn stays(&self) {
        self.unlink();
        self.place.remove();
    }

    /// The container runs elsewhere: removes it here.
    pub(super) fn remove(&self) -> Result<(), Failure> {
        remove(&self.engine, &self.found.id, self.name())?;
        self.place.remove();
        Ok(())
    }
}

/// The end of a migration at the source, whose command has ended before it was over: the container is removed if it goes on
/// elsewhere. None of that concerns a migration of a process.
pub(super) fn settle(migration: &str, moved: bool) -> Result<(), Failure> {
    let place = Place::of(migration);
    let Some(note) = noted(&place) else { return Ok(()) };
    let Note { podman, id, name, static_dir } = note;
    unlink(&static_dir, &place);
    if moved {
        remove(&Engine::podman(Some(&podman)), &id, &name)?;
    }
    place.remove();
    Ok(())
}

/// The command of a migration was killed: podman's next checkpoint of the container goes where its checkpoints go.
pub(super) fn sweep(migration: &str) {
    let place = Place::of(migration);
    if let Some(note) = noted(&place) {
        unlink(&note.static_dir, &place);
    }
}

fn noted(place: &Place) -> Option<Note> {
    serde_json::from_slice(&place.noted()?).ok()
}

fn leads_to(link: &Path, place: &Place) -> bool {
    link.parent() == place.path("x").parent()
}

fn unlink(static_dir: &Path, place: &Place) {
    let checkpoint = static_dir.join(CHECKPOINT);
    if fs::read_link(&checkpoint).is_ok_and(|it| leads_to(&it, place)) {
        let _ = fs::remove_file(checkpoint);
    }
}

fn remove(engine: &Engine, id: &str, name: &str) -> Result<(), Failure> {
    let removed = engine.ask(&["rm", "--force", "--ignore", "--time", "0", id]);
    removed.map(drop).map_err(|said| {
        said.failed(&format!(
            "podman does not remove container {name}, which stands still here: `podman rm --force {id}`"
        ))
    })
}

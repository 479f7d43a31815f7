//! The GPUs that containers were given, in files, so that a restarted daemon knows them.
//!
//! Each container has a file, in a folder that only the daemon's user can access and that no container sees. A file holds as
//! long as the process that it names is there, started at the moment and in the namespaces that it names.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rekindle_wire::control::ContainerLimits;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::super::process::Process;
use super::super::{state_dir, sys};
use super::container::{Cgroups, Container, Place, Uuid};
use rekindle_ctx_worker::share;

/// The name of the table of a container's workers.
const TABLE: &str = "share";
/// The version of the files' content.
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Kept {
    version: u32,
    /// The identifier of the machine's start: process numbers and namespaces mean nothing after the next start.
    boot: String,
    container: String,
    pid: i32,
    start: u64,
    place: Place,
    more: Vec<Cgroups>,
    gpus: Option<Vec<Uuid>>,
    device_memory: Option<u64>,
    pinned_memory: Option<u64>,
    workers: Option<u32>,
    /// The name of the protocol. Files of older daemons lack it.
    #[serde(default)]
    protocol: Option<String>,
    #[serde(default)]
    share: bool,
}

/// Writes a container's file completely or not at all.
pub(super) fn keep(dir: &Path, container: &Container) -> io::Result<()> {
    state_dir::make(dir)?;
    let ContainerLimits { device_memory, pinned_memory, workers } = container.limits;
    let kept = Kept {
        version: VERSION,
        boot: state_dir::boot()?,
        container: container.id.clone(),
        pid: container.first.pid,
        start: container.first.start,
        place: container.place.clone(),
        more: container.more.clone(),
        gpus: container.gpus.clone(),
        device_memory,
        pinned_memory,
        workers,
        protocol: container.protocol.map(|it| it.as_str().to_owned()),
        share: container.share,
    };
    state_dir::write(&path(dir, container), &serde_json::to_vec(&kept)?)
}

/// The table of what the container's workers use; each call opens it anew.
pub(super) fn table(dir: &Path, container: &Container) -> io::Result<File> {
    let path = path(dir, container).with_extension(TABLE);
    File::options().read(true).write(true).create(true).truncate(false).open(path)
}

/// Empties a worker's row of the table, if there is one.
pub(super) fn release(dir: &Path, container: &Container, worker: i32) -> io::Result<()> {
    match File::options().read(true).write(true).open(path(dir, container).with_extension(TABLE)) {
        Ok(table) => share::release(&table, worker),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Removes a container's files.
pub(super) fn forget(dir: &Path, container: &Container) {
    let path = path(dir, container);
    for path in [path.with_extension(TABLE), path] {
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            warn!("cannot remove {}: {error}", path.display());
        }
    }
}

/// The containers that are still there. Files of others are removed.
pub(super) fn load(dir: &Path) -> Vec<Container> {
    if !state_dir::is_ours(dir) {
        return Vec::new();
    }
    let (Ok(entries), Ok(boot)) = (fs::read_dir(dir), state_dir::boot()) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            // The file is not a container's.
            continue;
        }
        if path.extension().is_some_and(|it| it == TABLE) {
            if !path.with_extension("json").exists() {
                let _ = fs::remove_file(&path);
            }
            continue;
        }
        match read(&path, &boot) {
            Some(container) => found.push(container),
            None => {
                let _ = fs::remove_file(path.with_extension(TABLE));
                if let Err(error) = fs::remove_file(&path) {
                    warn!("cannot remove {}: {error}", path.display());
                }
            }
        }
    }
    found
}

fn read(path: &Path, boot: &str) -> Option<Container> {
    let kept: Kept = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    if kept.version != VERSION || kept.boot != boot {
        return None;
    }
    let first = Process { pid: kept.pid, start: kept.start };
    let process = sys::pidfd_open(first.pid).ok()?;
    // This also ensures that the descriptor is of that process.
    let place = Place::of(first).ok()?;
    // The process's cgroups may have changed: a container's first process may move itself below.
    (place.namespaces == kept.place.namespaces).then(|| Container {
        id: kept.container,
        first,
        process,
        place: kept.place,
        more: kept.more,
        gpus: kept.gpus,
        limits: ContainerLimits {
            device_memory: kept.device_memory,
            pinned_memory: kept.pinned_memory,
            workers: kept.workers,
        },
        protocol: kept.protocol.and_then(|it| it.parse().ok()),
        share: kept.share,
    })
}

fn path(dir: &Path, container: &Container) -> PathBuf {
    // The name is not the container's id, which may have any characters.
    dir.join(format!("{}-{}.json", container.first.pid, container.first.start))
}

#[cfg(test)]
mod tests {
    use super::super::{Given, Grants};
    use super::*;
    use rekindle_images::Protocol;
    use std::process::Command;

    #[test]
    fn what_was_given_outlives_the_daemon_and_not_the_container() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let first = Process::with_pid(child.id() as i32).unwrap();
        let limits = ContainerLimits { workers: Some(3), ..ContainerLimits::default() };
        let grants = Grants::load(&state, true);
        let given = Given { gpus: Some(vec![[1; 16]]), limits, protocol: Some(Protocol::Recopy), share: true };
        // In a namespace that only this process is in, only a cgroup tells the container apart, and this process is in it too.
        if grants.give("c", first, given).is_err() {
            child.kill().unwrap();
            child.wait().unwrap();
            return eprintln!("skipped: this process is in no cgroup");
        }
        grants.give("c", first, Given { gpus: Some(vec![[2; 16]]), ..Given::default() }).unwrap();

        fs::write(state.join("1-1.json"), "{}").unwrap();
        let again = Grants::load(&state, true);
        let allowed = again.of(first).unwrap();
        assert_eq!(allowed.gpus(), Some(&[[2; 16], [1; 16]][..]));
        assert_eq!(allowed.limits(), limits);
        assert_eq!(allowed.container.as_ref().unwrap().protocol, Some(Protocol::Recopy));
        assert!(allowed.container.as_ref().unwrap().share);
        assert_eq!(fs::read_dir(&state).unwrap().count(), 1, "what makes no sense is removed");

        child.kill().unwrap();
        child.wait().unwrap();
        again.collect();
        assert!(again.of(first).is_err());
        assert_eq!(fs::read_dir(&state).unwrap().count(), 0);
        assert!(load(&state).is_empty());
    }
}

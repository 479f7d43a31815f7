//! Where podman finds CRIU's images of a container that is migrated: at the same path on both hosts.
//!
//! ```text
//!   podman's directory of the container/checkpoint ──► /run/rekindle-migrations/MIGRATION/files/last
//!   /run/rekindle-migrations/MIGRATION/files ──► the migration's directory on this host; at the source as long as the command lives
//!                                     /container    at the source: what is removed there in the end
//!                                     /addresses    at the source: the addresses that move, which are removed there
//! ```
//!
//! podman puts the first link into its archive instead of the images, which are sent like those of processes, in memory and over
//! several connections. What is in `/run` lasts as long as the daemon's decisions: until the machine starts anew.
//!
//! Whoever ends a migration at its source locks its place meanwhile.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Serialize;

use crate::failure::Failure;
use crate::network::address::Address;

/// podman's name of the directory with CRIU's images of a container.
pub(super) const CHECKPOINT: &str = "checkpoint";
/// The directory of all places.
const ALL: &str = "/run/rekindle-migrations";
/// The link to the migration's directory.
const FILES: &str = "files";
/// The note about the container.
const CONTAINER: &str = "container";
/// The note about addresses.
const ADDRESSES: &str = "addresses";

/// The place of one migration.
#[derive(Clone, Debug)]
pub(super) struct Place(PathBuf);

impl Place {
    /// The place of the migration of this name, which is a plain one.
    pub(super) fn of(migration: &str) -> Self {
        Self(Path::new(ALL).join(migration))
    }

    /// A place elsewhere.
    #[cfg(test)]
    pub(super) fn at(dir: &Path) -> Self {
        Self(dir.to_owned())
    }

    /// Makes it, with a link to the migration's directory. An earlier link is replaced.
    pub(super) fn make(&self, dir: &Path) -> Result<(), Failure> {
        let link = self.0.join(FILES);
        let made = || -> io::Result<()> {
            self.create()?;
            match fs::remove_file(&link) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            symlink(std::path::absolute(dir)?, &link)
        };
        Ok(made().with_context(|| format!("cannot make {}", link.display()))?)
    }

    /// Makes it, without anything in it.
    pub(super) fn create(&self) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.0)
    }

    /// The path of one of the migration's directories.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(FILES).join(name)
    }

    /// Whether podman's directory of a container's checkpoint, below what it keeps of the container, leads here.
    pub(super) fn is_led_to(&self, static_dir: &Path) -> bool {
        let link = fs::read_link(static_dir.join(CHECKPOINT));
        link.is_ok_and(|it| it.parent() == Some(&self.0.join(FILES)))
    }

    /// Notes which container moves, in the place of what was noted before.
    pub(super) fn write(&self, container: &impl Serialize) -> Result<(), Failure> {
        self.write_as(CONTAINER, container)
    }

    /// Notes which addresses move.
    pub(super) fn write_addresses(&self, addresses: &[Address]) -> Result<(), Failure> {
        self.create().with_context(|| format!("cannot make {}", self.0.display()))?;
        self.write_as(ADDRESSES, &addresses)
    }

    /// The addresses that are noted.
    pub(super) fn addresses(&self) -> Vec<Address> {
        let noted = fs::read(self.0.join(ADDRESSES)).unwrap_or_default();
        serde_json::from_slice(&noted).unwrap_or_default()
    }

    /// Forgets the addresses.
    pub(super) fn forget_addresses(&self) {
        let _ = fs::remove_file(self.0.join(ADDRESSES));
        // Unless there is something else.
        let _ = fs::remove_dir(&self.0);
    }

    fn write_as(&self, name: &str, what: &impl Serialize) -> Result<(), Failure> {
        let path = self.0.join(name);
        let new = path.with_extension("new");
        let written = || -> io::Result<()> {
            fs::write(&new, serde_json::to_vec(what)?)?;
            fs::rename(&new, &path)
        };
        Ok(written().with_context(|| format!("cannot write {}", path.display()))?)
    }

    /// The note, if there is one.
    pub(super) fn noted(&self) -> Option<Vec<u8>> {
        fs::read(self.0.join(CONTAINER)).ok()
    }

    /// Waits until nobody else ends this migration here, and keeps others from it. None if somebody has ended it.
    pub(super) fn lock(&self) -> Result<Option<File>, Failure> {
        let locked = || -> io::Result<Option<File>> {
            let opened = match File::open(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                opened => opened?,
            };
            opened.lock()?;
            Ok(self.0.exists().then_some(opened))
        };
        Ok(locked().with_context(|| format!("cannot lock {}", self.0.display()))?)
    }

    /// The migrations that have a place.
    pub(super) fn all() -> impl Iterator<Item = String> {
        let entries = fs::read_dir(ALL).into_iter().flatten().flatten();
        entries.filter_map(|it| it.file_name().into_string().ok())
    }

    /// Removes it.
    pub(super) fn remove(&self) {
        let _ = fs::remove_dir_all(&self.0);
    }

    /// Removes it if the migration's directory, to which it leads, is gone, and nothing is noted: whoever settles the migration needs a note.
    pub(super) fn remove_if_left(&self) {
        if self.noted().is_none()
            && self.addresses().is_empty()
            && fs::read_link(self.0.join(FILES)).is_ok_and(|it| !it.exists())
        {
            self.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_leads_to_the_place_of_its_migration_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, other) = (Place::of("ab"), Place::of("abc"));
        assert!(!ours.is_led_to(dir.path()));
        let link = dir.path().join(CHECKPOINT);
        symlink(ours.path("last-ab"), &link).unwrap();
        assert!(ours.is_led_to(dir.path()) && !other.is_led_to(dir.path()));
        fs::remove_file(&link).unwrap();
        fs::create_dir(&link).unwrap();
        assert!(!ours.is_led_to(dir.path()), "podman's own");
    }
}

//! Processes that run here before they have all pages of their own (`migrate --lazy`): the images stay until they have, and longer if they do
//! not get them.
//!
//! ```text
//!   the receiver lets them run ─► ID/owned ────────────┐
//!                                                      ├── whoever finds both removes the images
//!   their guard has seen all pages ─► ID/whole.GUARD ──┤
//!                                                      ├── whoever finds both lets `rekindle restore` have the image
//!   their guard has killed them ─► ID/killed.GUARD ────┘
//! ```
//!
//! `ID/guard` names the guard, by its folder: an attempt to restore the processes may have failed, and its guard may end late.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use rekindle_wire::control::HELD_FILE;
use rekindle_wire::lazy_pages;
use rustix::fs::{FlockOperation, flock};

/// The end of the name of the file that says that a migration's processes have been let run, beside its directory.
pub(crate) const RUNNING: &str = "running";
/// The processes have been let run.
const OWNED: &str = "owned";
/// Their guard.
const GUARD: &str = "guard";
/// How that has ended.
const WHOLE: &str = "whole";
const KILLED: &str = "killed";

/// Processes of a migration are about to be restored, once more if they were before, with this guard.
pub(crate) fn begin(migration: &Path, guard: &str) -> anyhow::Result<()> {
    let mark = migration.join(OWNED);
    match fs::remove_file(&mark) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot remove {}", mark.display()));
        }
        _ => {}
    }
    let path = migration.join(GUARD);
    fs::write(&path, guard).with_context(|| format!("cannot write {}", path.display()))
}

/// The processes run, whose image this is.
pub(crate) fn run(migration: &Path, image: &Path) {
    // Without the mark the images stay, until somebody removes them.
    if mark(&migration.join(OWNED)).is_err() {
        return;
    }
    let Some(guard) = guard(migration) else { return };
    if ended(migration, WHOLE, &guard).exists() {
        remove(migration);
    } else if ended(migration, KILLED, &guard).exists() {
        may_be_restored(image);
    }
}

/// Whether processes have been let run whose images are there.
pub(crate) fn has_run(migration: &Path) -> bool {
    migration.join(OWNED).exists()
}

/// Whether nobody needs the images of processes that have been let run, and nobody will say so: their guard was killed, and CRIU's server has
/// ended since.
pub(crate) fn is_left(migration: &Path) -> bool {
    let is_left = |guard: String| !ended(migration, KILLED, &guard).exists() && !is_served(&guard);
    has_run(migration) && guard(migration).is_some_and(is_left)
}

/// A guard has guarded the processes until they had all their pages.
pub(super) fn are_whole(migration: &Path, guard: &str) {
    if has_ended(migration, WHOLE, guard) {
        remove(migration);
    }
}

/// A guard has killed the processes, since they would not have got all their pages.
pub(super) fn are_killed(migration: &Path, guard: &str, image: &Path) {
    if has_ended(migration, KILLED, guard) {
        may_be_restored(image);
    }
}

/// Removes all of a migration whose processes have been let run, and notes that they have.
pub(crate) fn remove(migration: &Path) {
    let noted = File::create(migration.with_extension(RUNNING)).and_then(|it| it.sync_all());
    if noted.is_ok() {
        let _ = fs::remove_dir_all(migration);
    }
}

/// Notes how a guard has ended. Returns whether its processes had been let run.
fn has_ended(migration: &Path, how: &str, own: &str) -> bool {
    mark(&ended(migration, how, own)).is_ok() && has_run(migration) && guard(migration).is_some_and(|it| it == own)
}

/// Nobody else has the processes: their image may be restored like any other.
fn may_be_restored(image: &Path) {
    let _ = fs::remove_file(image.join(HELD_FILE));
}

/// Whether a guard or its server lives: one of them holds the lock of the guard's folder.
fn is_served(guard: &str) -> bool {
    let folder = Path::new(lazy_pages::FOLDER).join(guard);
    File::open(folder).is_ok_and(|it| flock(&it, FlockOperation::NonBlockingLockShared).is_err())
}

fn guard(migration: &Path) -> Option<String> {
    fs::read_to_string(migration.join(GUARD)).ok().filter(|it| !it.is_empty() && !it.contains('/'))
}

fn ended(migration: &Path, how: &str, guard: &str) -> PathBuf {
    migration.join(format!("{how}.{guard}"))
}

/// Leaves a mark, which is there after a crash, too.
fn mark(path: &Path) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(b"\n")?;
    file.sync_all()?;
    path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the image is there after these steps, and whether it waits for somebody who holds the processes.
    fn after(steps: &[fn(&Path)]) -> (bool, bool) {
        let dir = tempfile::tempdir().unwrap();
        let migration = dir.path().join("a");
        fs::create_dir_all(migration.join("last")).unwrap();
        File::create(migration.join("last").join(HELD_FILE)).unwrap();
        begins(&migration);
        steps.iter().for_each(|step| step(&migration));
        (migration.join("last").exists(), migration.join("last").join(HELD_FILE).exists())
    }

    fn begins(migration: &Path) {
        begin(migration, "7").unwrap();
    }

    fn begins_with_another_guard(migration: &Path) {
        begin(migration, "7.1").unwrap();
    }

    fn runs(migration: &Path) {
        run(migration, &migration.join("last"));
    }

    fn is_whole(migration: &Path) {
        are_whole(migration, "7");
    }

    fn kills(migration: &Path) {
        are_killed(migration, "7", &migration.join("last"));
    }

    #[test]
    fn images_stay_until_the_processes_run_and_have_all_their_pages() {
        assert_eq!(after(&[runs]), (true, true));
        assert_eq!(after(&[is_whole]), (true, true));
        assert_eq!(after(&[runs, is_whole]), (false, false));
        assert_eq!(after(&[is_whole, runs]), (false, false));
    }

    #[test]
    fn what_the_guard_of_an_earlier_attempt_says_does_not_count() {
        for ends in [is_whole as fn(&Path), kills] {
            assert_eq!(after(&[runs, begins_with_another_guard, ends]), (true, true));
            assert_eq!(after(&[begins_with_another_guard, runs, ends]), (true, true));
            assert_eq!(after(&[ends, begins_with_another_guard, runs]), (true, true));
        }
    }

    #[test]
    fn the_image_of_killed_processes_can_be_restored_if_they_were_let_run_here() {
        assert_eq!(after(&[runs, kills]), (true, false));
        assert_eq!(after(&[kills, runs]), (true, false));
        assert_eq!(after(&[kills]), (true, true), "they may be another host's");
    }

    #[test]
    fn images_are_left_when_guard_and_server_have_gone_without_a_word() {
        let dir = tempfile::tempdir().unwrap();
        // No guard has this name.
        begin(dir.path(), "0").unwrap();
        assert!(!is_left(dir.path()), "they do not run");
        runs(dir.path());
        assert!(has_run(dir.path()) && is_left(dir.path()));
        File::create(ended(dir.path(), KILLED, "0")).unwrap();
        assert!(!is_left(dir.path()), "somebody may restore them");
    }
}

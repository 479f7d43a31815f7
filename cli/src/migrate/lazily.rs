//! Processes that run here before they have all pages of their own (`migrate --lazy`): the images stay until they have, and longer if they do
//! not get them.
//!
//! ```text
//!   the receiver lets them run ─► ID/owned ──┐
//!                                            ├── whoever finds both removes the images
//!   their guard has seen all pages ─► ID/whole ┘
//!
//!   their guard has killed them ─► the images stay, and can be restored by `rekindle restore`
//! ```

use std::fs::{self, File};
use std::io;
use std::path::Path;

use anyhow::Context;
use rekindle_wire::control::HELD_FILE;

use super::target;

/// The processes have been let run.
const OWNED: &str = "owned";
/// The processes have all their pages.
const WHOLE: &str = "whole";

/// Processes of a migration are about to be restored, once more if they were before.
pub(super) fn begin(migration: &Path) -> anyhow::Result<()> {
    for mark in [OWNED, WHOLE].map(|it| migration.join(it)) {
        match fs::remove_file(&mark) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", mark.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The processes run.
pub(super) fn run(migration: &Path) {
    both(migration, OWNED, WHOLE);
}

/// Whether processes run whose images are there.
pub(super) fn runs(migration: &Path) -> bool {
    migration.join(OWNED).exists()
}

/// The processes have all their pages.
pub(crate) fn are_whole(migration: &Path) {
    both(migration, WHOLE, OWNED);
}

/// Leaves a mark, and removes the images if the other one is there. Both sides may find that: removing them twice does no harm.
fn both(migration: &Path, mark: &str, other: &str) {
    // Without the mark the images stay, until somebody removes them.
    if File::create(migration.join(mark)).is_ok() && migration.join(other).exists() {
        target::remove(migration);
    }
}

/// The processes were killed, since they would not have got all their pages. If they had been let run, nobody else has them: the image may be
/// restored like any other.
pub(crate) fn are_killed(migration: &Path, image: &Path) {
    if runs(migration) {
        let _ = fs::remove_file(image.join(HELD_FILE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A migration's directory, and what is left of it after these steps.
    fn after(steps: &[fn(&Path)]) -> (bool, bool) {
        let dir = tempfile::tempdir().unwrap();
        let migration = dir.path().join("a");
        fs::create_dir_all(migration.join("last")).unwrap();
        File::create(migration.join("last").join(HELD_FILE)).unwrap();
        steps.iter().for_each(|step| step(&migration));
        (migration.join("last").exists(), migration.join("last").join(HELD_FILE).exists())
    }

    #[test]
    fn images_stay_until_the_processes_run_and_have_all_their_pages() {
        assert_eq!(after(&[run]), (true, true));
        assert_eq!(after(&[are_whole]), (true, true));
        assert_eq!(after(&[run, are_whole]), (false, false));
        assert_eq!(after(&[are_whole, run]), (false, false));
        assert_eq!(after(&[run, are_whole, are_whole, run]), (false, false));
        let again = |migration: &Path| begin(migration).unwrap();
        assert_eq!(after(&[run, again, are_whole]), (true, true), "they have not run again yet");
        assert_eq!(after(&[are_whole, again, run]), (true, true), "they have not all pages again");
    }

    #[test]
    fn the_image_of_killed_processes_can_be_restored_if_they_were_let_run_here() {
        let killed = |migration: &Path| are_killed(migration, &migration.join("last"));
        assert_eq!(after(&[run, killed]), (true, false));
        assert_eq!(after(&[killed]), (true, true), "they may be another host's");
    }
}

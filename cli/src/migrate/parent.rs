//! The directory that has those of all migrations. Anybody may make it where its parent is for all, as `/dev/shm` is, and could replace
//! the images in it. So it must belong to the user whose migrations these are.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use anyhow::{Context, anyhow};

use crate::failure::Failure;
use crate::owner;

/// Makes it, unless it is there and belongs to this user alone. One that others may write to must keep everybody's files apart, as
/// `/tmp` does.
pub(super) fn make(dir: &Path) -> Result<(), Failure> {
    let made = || -> io::Result<_> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        fs::metadata(dir)
    };
    let about = made().with_context(|| format!("cannot make {}", dir.display()))?;
    let (for_others, is_sticky) = (about.mode() & owner::OTHERS_WRITE != 0, about.mode() & 0o1000 != 0);
    if owner::is_trusted(&about) && (!for_others || is_sticky) {
        return Ok(());
    }
    let dir = dir.display();
    Err(Failure::refused(anyhow!(
        "others may write to {dir}, or it is another user's: remove it, or name another directory"
    )))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use tempfile::TempDir;

    use super::*;

    #[test]
    fn a_directory_in_which_others_may_replace_files_is_refused() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("a/b");
        make(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o700);
        for (mode, is_good) in [(0o755, true), (0o1777, true), (0o777, false), (0o720, false)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(make(&path).is_ok(), is_good, "{mode:o}");
        }
    }
}

//! Whom files belong to.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// The bits of a mode by which others than the owner write.
pub(crate) const OTHERS_WRITE: u32 = 0o022;

/// Whether a file or directory belongs to root or to the user who runs this.
pub(crate) fn is_trusted(about: &Metadata) -> bool {
    about.uid() == 0 || about.uid() == rustix::process::geteuid().as_raw()
}

//! A dump of a tree without clients. A process of the tree may have been frozen in the middle of its handshake, or of a
//! question to the daemon; its socket then makes the dump one of Rekindle's.

use std::time::Instant;

use rekindle_images::{CreateOptions, ImageDir, ImageWriter};
use tracing::warn;

use super::error::DumpError;
use super::quiesced::Begun;
use super::saving::Saving;
use super::tree::Tree;

/// A dump of a tree without clients.
pub(super) struct NotOurs {
    pub(super) dir: ImageDir,
    pub(super) beside: Option<ImageDir>,
}

impl NotOurs {
    /// CRIU is about to overwrite its files in the directory.
    pub(super) fn frozen(&self) {
        disown_older_image(&self.dir);
    }

    /// A process of the tree has a socket of Rekindle's, so there is something to save.
    pub(super) fn save(self, tree: &Tree<'_>) -> Result<Saving, DumpError> {
        let now = Instant::now();
        let begun = Begun {
            rings: Vec::new(),
            planned: Vec::new(),
            writer: tree.begin_image(self.dir)?,
            clones: tree.daemon.copying.memory_pressure.hold([]),
            beside: self.beside,
            quiesce_began: tree.began,
            idle_at: now,
        };
        begun.save(tree, now)
    }

    /// CRIU has dumped the tree. With an older image beside that dump, a restore would look for processes that the dump does
    /// not have.
    pub(super) fn finish(&self) {
        remove_older_image(&self.dir);
    }
}

/// Removes the older image. CRIU's image of a tree without GPU state must not lie beside our image of another dump: a restore
/// would take the two for one.
fn remove_older_image(dir: &ImageDir) {
    if let Err(error) = dir.try_clone().and_then(ImageWriter::remove_image) {
        warn!(directory = %dir.path().display(), "cannot remove an older image: {error}");
    }
}

/// Marks the older image so that it is not restored, until the dump has ended. A failure here does not fail the dump of a tree
/// that is not ours; in that case a restore still finds that CRIU's inventory is another.
fn disown_older_image(dir: &ImageDir) {
    let options = CreateOptions::new().map(|it| CreateOptions { replace: true, ..it });
    let writer = options.and_then(|options| ImageWriter::create(dir.try_clone()?, options));
    if let Err(error) = writer.and_then(|it| it.disown()) {
        warn!(directory = %dir.path().display(), "cannot mark an older image: {error}");
    }
}

//! The chain of images that one builds on.
//!
//! ```text
//!   this image ──parent──► 1 ──parent──► 2 …        each: directory, id and manifest's checksum of the next
//!       │  piece: depth 2 ───────────────▲           a piece says directly in which ancestor it is
//! ```

use std::path::Path;

use crate::ImageError;
use crate::dir::ImageDir;
use crate::hash::Checksum;
use crate::layer::Layer;
use crate::limits::MAX_ANCESTORS;
use crate::manifest::{Manifest, Parent};
use crate::record::FileSizes;

/// An image that another builds on: what is needed to read its files.
#[derive(Debug)]
pub(crate) struct Ancestor {
    pub(crate) dir: ImageDir,
    pub(crate) files: FileSizes,
    pub(crate) manifest_hash: Checksum,
}

/// The ancestors of an image in `dir`, the nearest first, each the one that was built on.
pub(crate) fn open(dir: &ImageDir, manifest: &Manifest) -> Result<Vec<Ancestor>, ImageError> {
    walk(dir, manifest, None)
}

/// The writer for which a chain is held.
#[derive(Clone, Copy)]
pub(crate) struct Holder<'a> {
    /// The directory that it writes to. No image of the chain may be there.
    pub(crate) dir: &'a ImageDir,
}

/// As [`open`]; as long as the result lives, no other writer changes any of them.
///
/// # Errors
/// [`ImageError::Busy`] and [`ImageError::Overwrites`] as well.
pub(crate) fn hold(dir: &ImageDir, manifest: &Manifest, holder: Holder<'_>) -> Result<Vec<Ancestor>, ImageError> {
    walk(dir, manifest, Some(holder))
}

fn walk(dir: &ImageDir, manifest: &Manifest, holder: Option<Holder<'_>>) -> Result<Vec<Ancestor>, ImageError> {
    let own = holder.map(|it| it.dir.identity()).transpose()?;
    let mut ancestors: Vec<Ancestor> = Vec::new();
    let mut parent = manifest.parent.clone();
    while let Some(Parent { path, id, manifest_hash }) = parent {
        let from = ancestors.last().map_or(dir, |last| &last.dir);
        let bad = |what: String| ImageError::Parent { dir: from.path().join(&path), what };
        if ancestors.len() == MAX_ANCESTORS {
            return Err(bad(format!("there are more than {MAX_ANCESTORS} images behind each other")));
        }
        let found = open_parent(from, &path).map_err(|error| bad(error.to_string()))?;
        if holder.is_some() {
            // Before anything in it is read: that stays so.
            found.share()?;
        }
        let layer = Layer::read(found).map_err(|error| bad(error.to_string()))?;
        if layer.manifest.id != id {
            return Err(bad(format!("it is checkpoint {}, and {id} was built on", layer.manifest.id)));
        }
        if layer.manifest_hash != manifest_hash {
            return Err(bad(format!("checkpoint {id} has been changed or written again since")));
        }
        if layer.manifest.hash_key != manifest.hash_key {
            return Err(bad("its pieces are hashed with another key".to_owned()));
        }
        // Only now: an image that was not built on is no loss. Images behind this one may be missing all the same.
        if let Some(holder) = holder.filter(|_| own == layer.dir.identity().ok()) {
            let parent = dir.place().unwrap_or_else(|_| dir.path().to_owned());
            return Err(ImageError::Overwrites { dir: holder.dir.path().to_owned(), parent });
        }
        parent = layer.manifest.parent;
        ancestors.push(Ancestor { dir: layer.dir, files: layer.files, manifest_hash });
    }
    Ok(ancestors)
}

fn open_parent(dir: &ImageDir, path: &Path) -> Result<ImageDir, ImageError> {
    match dir.open_relative(path) {
        Err(ImageError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            Err(ImageError::Missing { file: path.display().to_string(), dir: dir.path().to_owned() })
        }
        result => result,
    }
}

//! The base of a new image: the image in the directory that a link in the new image's directory leads to.

use rekindle_images::{Base, ErrorKind, ImageDir, ImageError};
use tracing::{info, warn};

/// The image that a new image in `dir` is to build on, if there is a suitable one. Otherwise the new image is complete by
/// itself; a missing base is no reason to fail a dump.
///
/// # Errors
/// [`ImageError::Overwrites`]: the base builds on the image that the new one would replace, so both would be lost before the
/// new one is durable.
pub(super) fn find(dir: &ImageDir) -> Result<Option<Base>, ImageError> {
    match Base::find(dir) {
        Ok(base) => {
            if let Some(base) = &base {
                let image = base.image();
                info!(parent = %image.manifest().id, depth = image.depth() + 1, "building on the image in {}", image.dir().path().display());
            }
            Ok(base)
        }
        Err(error) if error.kind() == ErrorKind::Overwrites => Err(error),
        Err(error) => {
            warn!("the image will be a full one, since it cannot build on its parent: {error}");
            Ok(None)
        }
    }
}

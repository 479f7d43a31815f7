//! Rekindle's libraries that an image's processes map again. A build that is not here is added from the image before CRIU looks for
//! its files.

use rekindle_builds::{BuildError, BuildId, INTERPOSER, Library, Store};
use rekindle_images::{Image, ImageError};
use rekindle_wire::control::{Failing, FailureKind};
use thiserror::Error;
use tracing::{info, warn};

/// The most builds of an image: its processes have been started under so many releases.
const MOST: usize = 16;

/// Why a build that an image needs is not here.
#[derive(Debug, Error)]
pub(in crate::daemon) enum LibraryError {
    #[error("bad image: {0}")]
    Image(#[from] ImageError),
    #[error(
        "the image's processes need build {id} of Rekindle's libraries, which cannot be added here ({source}): as root, run `rekindle builds add` with the image's directory"
    )]
    NotAdded { id: BuildId, source: BuildError },
    #[error("bad image: it has {0} builds of Rekindle's libraries, and at most {MOST} are allowed")]
    TooMany(usize),
    #[error("bad image: {0:?} is no library of Rekindle")]
    Unknown(String),
}

impl Failing for LibraryError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Image(error) => rekindle_ctx_worker::failure::of_image(error),
            Self::Unknown(_) | Self::TooMany(_) | Self::NotAdded { source: BuildError::Changed { .. }, .. } => {
                FailureKind::BadImage
            }
            Self::NotAdded { .. } => FailureKind::Refused,
        }
    }
}

/// Adds the builds that the image carries and this machine lacks. A process maps its libraries at the path where they were, so a build
/// is added only if that is where it lies here too.
pub(super) fn add_missing(image: &Image, store: &Store) -> Result<(), LibraryError> {
    let builds = &image.manifest().builds;
    if builds.len() > MOST {
        return Err(LibraryError::TooMany(builds.len()));
    }
    for build in builds {
        let id = BuildId::from_bytes(build.id);
        if build.directory.join(INTERPOSER).is_file() {
            continue;
        }
        if build.directory != store.dir(id) {
            // Not an error: in a container the path is another one.
            warn!(
                "the image's processes have mapped {}, which is not here; Rekindle's builds lie in {}",
                build.directory.display(),
                store.builds_dir().display()
            );
            continue;
        }
        let libraries = build.libraries.iter().map(|it| library(image, it)).collect::<Result<Vec<_>, _>>()?;
        let added = store.lock().and_then(|store| store.add(libraries, Some(id)));
        added.map_err(|source| LibraryError::NotAdded { id, source })?;
        info!(%id, "the image has brought its build of Rekindle's libraries");
    }
    Ok(())
}

fn library(image: &Image, library: &rekindle_images::Library) -> Result<Library, LibraryError> {
    let found = Library::named(&library.name, image.code_file(library.code)?);
    found.ok_or_else(|| LibraryError::Unknown(library.name.clone()))
}

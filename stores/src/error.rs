//! Everything that can go wrong with a store.

use std::io;
use std::path::{Path, PathBuf};

use rekindle_images::ImageError;

/// Why a store, or an image in one, cannot be used. Each message says what failed and, where there is something to
/// do, what.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// An address or a name that cannot be one.
    #[error("{what}")]
    Usage {
        /// What is wrong with it.
        what: String,
    },

    /// There is no store at the address.
    #[error("there is no store at {url}; `rekindle images init {url}` makes one")]
    NoStore {
        /// The address.
        url: String,
    },

    /// There is a store where one was to be made.
    #[error("there is a store at {url} already")]
    StoreExists {
        /// The address.
        url: String,
    },

    /// The store has no image of that name.
    #[error("the store at {url} has no image {name:?}; `rekindle images ls {url}` lists those that it has")]
    NoImage {
        /// The image's name.
        name: String,
        /// The store's address.
        url: String,
    },

    /// The store has an image of that name.
    #[error("the store at {url} has an image {name:?} already; choose another name, or remove that one first")]
    ImageExists {
        /// The image's name.
        name: String,
        /// The store's address.
        url: String,
    },

    /// The key is missing, is another, or cannot be read.
    #[error("{what}")]
    Key {
        /// What is wrong with it, and what to do.
        what: String,
    },

    /// An object of a store is not what was written.
    #[error("{object} in the store is damaged: {what}")]
    Damaged {
        /// The object's name.
        object: String,
        /// A description of the error.
        what: String,
    },

    /// An object that an image needs is not in the store.
    #[error("{object} is missing from the store: copy the image there again from where it is whole")]
    Missing {
        /// The object's name.
        object: String,
    },

    /// A newer version of the product wrote it.
    #[error("{object} has format {found}, and this program reads up to {supported}; use a newer rekindle")]
    Newer {
        /// The object's name.
        object: String,
        /// The format that it has.
        found: u32,
        /// The newest format that can be read.
        supported: u32,
    },

    /// What was asked for cannot be done.
    #[error("{what}")]
    Refused {
        /// Why, and what to do.
        what: String,
    },

    /// An image in a directory cannot be read.
    #[error(transparent)]
    Image(#[from] ImageError),

    /// A file is no archive of a container that could be stored.
    #[error("{} is no whole archive of a container with GPU processes: {what}", .path.display())]
    Archive {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },

    /// A file of this machine cannot be read or written.
    #[error("cannot {action} {}: {source}", .path.display())]
    Local {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },

    /// The store did not do what it was asked for.
    #[error("cannot {action} {object} in the store: {what}")]
    Remote {
        /// What was tried.
        action: &'static str,
        /// The object's name.
        object: String,
        /// What the store said.
        what: String,
    },
}

impl StoreError {
    pub(crate) fn usage(what: impl Into<String>) -> Self {
        Self::Usage { what: what.into() }
    }

    pub(crate) fn key(what: impl Into<String>) -> Self {
        Self::Key { what: what.into() }
    }

    pub(crate) fn refused(what: impl Into<String>) -> Self {
        Self::Refused { what: what.into() }
    }

    pub(crate) fn damaged(object: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Damaged { object: object.into(), what: what.into() }
    }

    pub(crate) fn remote(action: &'static str, object: impl Into<String>, what: impl ToString) -> Self {
        Self::Remote { action, object: object.into(), what: what.to_string() }
    }

    /// For `map_err`: a file of this machine could not be used.
    pub(crate) fn local(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Local { action, path, source }
    }

    /// Whether an image, in a store or in a directory, is bad.
    #[must_use]
    pub fn is_bad_image(&self) -> bool {
        match self {
            Self::Damaged { .. } | Self::Missing { .. } | Self::Archive { .. } => true,
            Self::Image(error) => error.kind().is_bad_image(),
            _ => false,
        }
    }
}

//! What goes wrong with builds.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::{BuildId, INTERPOSER};

/// A build that cannot be read, added or removed.
#[derive(Debug, Error)]
pub enum BuildError {
    /// An operation on a file has failed.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// The operation: "cannot read".
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A directory has no interposer.
    #[error("{} has no {INTERPOSER}: it holds no build of Rekindle's libraries", .0.display())]
    NoBuild(PathBuf),
    /// The files are not those that their build's name promises.
    #[error("the libraries in {} are those of build {found}, not of {expected}: reinstall Rekindle", path.display())]
    Changed {
        /// Where they are.
        path: PathBuf,
        /// The name of their directory, or of the build that they should be.
        expected: BuildId,
        /// The build that they are.
        found: BuildId,
    },
    /// A library that is none of Rekindle's.
    #[error("{name} has more than {limit} bytes: it is no library of Rekindle")]
    TooLarge {
        /// The library.
        name: &'static str,
        /// The most bytes that one may have.
        limit: u64,
    },
    /// Somebody else changes what is in the directory, and does not end.
    #[error("somebody else adds or removes builds in {} and does not end: look for another `rekindle builds`", .0.display())]
    Busy(PathBuf),
    /// No such build is here.
    #[error("build {id} is not in {}: `rekindle builds` lists those that are", path.display())]
    Absent {
        /// The build.
        id: BuildId,
        /// The directory of builds.
        path: PathBuf,
    },
    /// The build that new applications are given is not removed.
    #[error("build {0} is what new applications are given, and stays")]
    Chosen(BuildId),
}

impl BuildError {
    pub(crate) fn at(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { what, path, source }
    }
}

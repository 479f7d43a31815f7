//! Everything that can go wrong with an image.

use std::io;
use std::path::PathBuf;

/// Why an image cannot be read or written.
///
/// Each message says what failed and, where there is something to do, what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The directory holds nothing of ours.
    #[error("no checkpoint of GPU state in {}: it has no rekindle.img", .dir.display())]
    NotAnImage {
        /// The directory.
        dir: PathBuf,
    },

    /// A dump began here and did not end.
    #[error("image in {} is not committed: the dump did not finish; take a new checkpoint", .dir.display())]
    Uncommitted {
        /// The directory.
        dir: PathBuf,
    },

    /// A file is not what was written.
    #[error("{file} is corrupt{}: {what}", at(.offset))]
    Corrupt {
        /// Name of the file in the image's directory.
        file: String,
        /// Where in the file, in bytes, if that is known.
        offset: Option<u64>,
        /// A description of the error.
        what: String,
    },

    /// A file that belongs to the image is not there.
    #[error("{file} is missing from {}: copy the whole directory", .dir.display())]
    Missing {
        /// Name of the file.
        file: String,
        /// The directory.
        dir: PathBuf,
    },

    /// An image that this one builds on is not there, or not as it was.
    #[error(
        "image builds on the one in {}, which cannot be used: {what}; put that back as it was, or use another image",
        .dir.display()
    )]
    Parent {
        /// Where that one should be.
        dir: PathBuf,
        /// A description of the error.
        what: String,
    },

    /// The image was written by a newer version of the product.
    #[error("{file} has format version {found}, and this program reads up to {supported}; use a newer rekindle")]
    NewerFormat {
        /// Name of the file.
        file: String,
        /// Version in the file.
        found: u32,
        /// The newest version that can be read.
        supported: u32,
    },

    /// The image is sound, but needs something that this version does not do.
    #[error("image needs {what}, which this version of rekindle does not support")]
    Unsupported {
        /// The feature.
        what: String,
    },

    /// A size is beyond what the format allows.
    #[error("{file}: {what} is {size} bytes, and the limit is {limit}")]
    TooLarge {
        /// Name of the file.
        file: String,
        /// The name of the part that is too large.
        what: &'static str,
        /// Its size in bytes.
        size: u64,
        /// The limit in bytes.
        limit: u64,
    },

    /// The disk, a quota or a file size limit is full.
    #[error("no space to write {length} bytes to {file}: {source}; free some or dump elsewhere")]
    NoSpace {
        /// Name of the file.
        file: String,
        /// Bytes that could not be written.
        length: u64,
        /// The system's error.
        source: io::Error,
    },

    /// The files of others in the directory, CRIU's, do not belong with the image.
    #[error(
        "CRIU's files in {} are of another dump than its image of GPU state: {what}; restore another image, or take a new \
        checkpoint",
        .dir.display()
    )]
    OtherDump {
        /// The directory.
        dir: PathBuf,
        /// How that shows.
        what: String,
    },

    /// The process that wanted the image no longer wanted it when the image was whole.
    #[error("the image in {} was given up before its commit", .dir.display())]
    GivenUp {
        /// The directory.
        dir: PathBuf,
    },

    /// The directory holds a committed image, and the writer was not told to replace it.
    #[error("{} already holds a committed image; choose another directory or ask to replace it", .dir.display())]
    Exists {
        /// The directory.
        dir: PathBuf,
    },

    /// Another writer is at work in the directory.
    #[error("another checkpoint is being written to {}; wait for it or choose another directory", .dir.display())]
    Busy {
        /// The directory.
        dir: PathBuf,
    },

    /// An image that is being written needs the one in the directory as it is.
    #[error(
        "the image in {} cannot be replaced or changed now: another that is being written builds on it; wait for that \
        or choose another directory",
        .dir.display()
    )]
    BuiltOn {
        /// The directory.
        dir: PathBuf,
    },

    /// The image to build on needs itself what is in the directory, which a new one there takes the place of.
    #[error(
        "the image in {} builds on the one in {}, which would be overwritten: choose another directory, or run \
        `rekindle flatten {}` first",
        .parent.display(), .dir.display(), .parent.display()
    )]
    Overwrites {
        /// The directory.
        dir: PathBuf,
        /// Where the image to build on is.
        parent: PathBuf,
    },

    /// The image to be written is not valid. This is a defect of the caller, found before commit.
    #[error("refused to write an image that could not be read back: {what}")]
    Invalid {
        /// A description of the error.
        what: String,
    },

    /// The operating system failed.
    #[error("cannot {action} {file}: {source}")]
    Io {
        /// The attempted action, as a verb.
        action: &'static str,
        /// Name of the file or directory.
        file: String,
        /// The system's error.
        source: io::Error,
    },
}

/// The kinds of an [`ImageError`] that callers treat differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The directory is not ours: leave it alone.
    NotAnImage,
    /// The dump did not finish.
    Uncommitted,
    /// Something in it was changed or damaged.
    Corrupt,
    /// A file of it is gone.
    Missing,
    /// An image that it builds on is gone or another.
    Parent,
    /// Written by a newer version.
    NewerFormat,
    /// Sound, but beyond what this version does.
    Unsupported,
    /// A size is beyond what the format allows.
    TooLarge,
    /// CRIU's part of the checkpoint is another's.
    OtherDump,
    /// The image was no longer wanted.
    GivenUp,
    /// Disk full, quota or file size limit reached.
    NoSpace,
    /// The directory holds a committed image already.
    Exists,
    /// Another writer is at work there, or elsewhere on an image that builds on the one there.
    Busy,
    /// A new image there would take the place of what the image that it is to build on needs.
    Overwrites,
    /// The caller's manifest is wrong.
    Invalid,
    /// The operating system failed.
    Io,
}

impl ErrorKind {
    /// Whether the image itself is at fault, and not the machine or the caller.
    #[must_use]
    pub fn is_bad_image(self) -> bool {
        matches!(
            self,
            Self::Uncommitted
                | Self::Corrupt
                | Self::Missing
                | Self::Parent
                | Self::NewerFormat
                | Self::Unsupported
                | Self::TooLarge
                | Self::OtherDump
        )
    }
}

impl ImageError {
    /// The class of the error, for exit codes and decisions.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotAnImage { .. } => ErrorKind::NotAnImage,
            Self::Uncommitted { .. } => ErrorKind::Uncommitted,
            Self::Corrupt { .. } => ErrorKind::Corrupt,
            Self::Missing { .. } => ErrorKind::Missing,
            Self::Parent { .. } => ErrorKind::Parent,
            Self::NewerFormat { .. } => ErrorKind::NewerFormat,
            Self::Unsupported { .. } => ErrorKind::Unsupported,
            Self::TooLarge { .. } => ErrorKind::TooLarge,
            Self::OtherDump { .. } => ErrorKind::OtherDump,
            Self::GivenUp { .. } => ErrorKind::GivenUp,
            Self::NoSpace { .. } => ErrorKind::NoSpace,
            Self::Exists { .. } => ErrorKind::Exists,
            Self::Busy { .. } | Self::BuiltOn { .. } => ErrorKind::Busy,
            Self::Overwrites { .. } => ErrorKind::Overwrites,
            Self::Invalid { .. } => ErrorKind::Invalid,
            Self::Io { .. } => ErrorKind::Io,
        }
    }

    pub(crate) fn corrupt(file: &str, what: impl Into<String>) -> Self {
        Self::Corrupt { file: file.to_owned(), offset: None, what: what.into() }
    }

    pub(crate) fn corrupt_at(file: &str, offset: u64, what: impl Into<String>) -> Self {
        Self::Corrupt { file: file.to_owned(), offset: Some(offset), what: what.into() }
    }

    pub(crate) fn io(action: &'static str, file: impl Into<String>, source: io::Error) -> Self {
        Self::Io { action, file: file.into(), source }
    }

    /// A failed write of `length` bytes: a full disk is told apart from other failures.
    pub(crate) fn write(file: &str, length: u64, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => Self::NoSpace { file: file.to_owned(), length, source },
            _ => Self::io("write", file, source),
        }
    }
}

fn at(offset: &Option<u64>) -> String {
    offset.map_or_else(String::new, |offset| format!(" at byte {offset}"))
}

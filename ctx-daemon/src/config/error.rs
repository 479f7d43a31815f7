//! What can be wrong with the configuration.

use std::path::PathBuf;

use rekindle_images::{NoCompression, UnknownProtocol};
use thiserror::Error;

/// Why the configuration cannot be loaded.
#[derive(Debug, Error)]
pub(crate) enum ConfigError {
    #[error("cannot read the configuration {}: {source}", .file.display())]
    Read { file: PathBuf, source: std::io::Error },
    #[error("{}: {source}", .file.display())]
    Parse { file: PathBuf, source: Box<toml::de::Error> },
    #[error("{what}: {value:?} {problem}")]
    Value { what: &'static str, value: String, problem: &'static str },
    #[error("image.compression: {0}")]
    Compression(#[from] NoCompression),
    #[error("checkpoint.protocol: {0}")]
    Protocol(#[from] UnknownProtocol),
    #[error("cannot tell where this program is or runs: {0}")]
    Here(std::io::Error),
}

impl ConfigError {
    /// The setting that is wrong, as `TABLE.NAME`, if it is one setting.
    pub(crate) fn setting(&self) -> Option<&'static str> {
        match self {
            Self::Value { what, .. } => Some(what),
            Self::Compression(_) => Some("image.compression"),
            Self::Protocol(_) => Some("checkpoint.protocol"),
            Self::Read { .. } | Self::Parse { .. } | Self::Here(_) => None,
        }
    }

    /// Whether there is no file.
    pub(crate) fn is_absence(&self) -> bool {
        matches!(self, Self::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
    }
}

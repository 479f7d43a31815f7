//! Reasons why a client is not saved.

use rekindle_wire::control::{Failing, FailureKind};
use thiserror::Error;

use crate::checkpoint::copying::error::CopyError;
use crate::resources::arrays::ArrayError;
use crate::session::state::StateError;

/// Why a client is not saved.
#[derive(Debug, Error)]
pub(crate) enum SaveError {
    #[error("it cannot be checkpointed: {0}")]
    Unsavable(String),
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    Array(#[from] ArrayError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error("a code image is missing")]
    NoCode,
    #[error("a variable's context is gone")]
    NoContext,
}

impl Failing for SaveError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Unsavable(_) => FailureKind::Refused,
            Self::Copy(error) => error.kind(),
            Self::State(error) => error.kind(),
            Self::Array(_) | Self::NoCode | Self::NoContext => FailureKind::Internal,
        }
    }
}

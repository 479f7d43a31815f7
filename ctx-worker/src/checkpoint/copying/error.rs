//! Reasons why device memory is not copied.

use rekindle_wire::control::{Failing, FailureKind};
use thiserror::Error;

use crate::gpu::driver::CallFailed;
use crate::resources::job::EngineError;
use crate::resources::vmm::aliases::AliasError;
use crate::session::state::StateError;

/// Why device memory is not copied.
#[derive(Debug, Error)]
pub(crate) enum CopyError {
    #[error("nothing is being copied")]
    Nothing,
    #[error("it is being copied already: wait until that is over")]
    Already,
    #[error("cannot start a thread that copies")]
    Thread,
    #[error("{0}")]
    Spawn(std::io::Error),
    #[error("more memory than can be hashed at a time")]
    TooMuch,
    #[error(transparent)]
    Aliases(#[from] AliasError),
    #[error(transparent)]
    Driver(#[from] CallFailed),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("{error}, by one of the kernels {kernels}")]
    MispredictedWrite { error: EngineError, kernels: String },
}

impl Failing for CopyError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Engine(error) | Self::MispredictedWrite { error, .. } => error.kind(),
            Self::State(error) => error.kind(),
            Self::Already => FailureKind::Refused,
            Self::Nothing | Self::Thread | Self::Spawn(_) | Self::TooMuch | Self::Aliases(_) | Self::Driver(_) => {
                FailureKind::Internal
            }
        }
    }
}

//! Why a restore fails.

use rekindle_ctx_worker::failure;
use rekindle_images::ImageError;
use rekindle_wire::control::{Failing, Failure, FailureKind};
use thiserror::Error;

use super::super::grants::{GrantError, ShareError};
use super::super::migrate::ArrivalError;
use super::super::native::NativeError;
use super::super::pidns::PidError;
use super::super::pool::PoolError;
use super::super::worker::WorkerError;
use super::check::CheckError;
use super::hold::{Abandoned, NotHeld};
use super::libraries::LibraryError;
use super::shared::SharedError;

/// Why a restore fails. By then the daemon has released everything of the restore.
#[derive(Debug, Error)]
pub(in crate::daemon) enum RestoreError {
    #[error("the image directory must come with the request")]
    NoDirectory,
    #[error(transparent)]
    Pid(#[from] PidError),
    #[error("bad image: {0}")]
    Image(#[from] ImageError),
    #[error(transparent)]
    Check(#[from] CheckError),
    #[error(transparent)]
    Library(#[from] LibraryError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("{0}: {1}")]
    Worker(String, WorkerError),
    #[error("process {pid}: {source}")]
    Shared { pid: i32, source: SharedError },
    #[error("{0} was restored without its connection: is the CRIU plugin of this version?")]
    NoConnection(String),
    #[error("{0} was restored without the memory that it shares with its worker")]
    NoMemory(String),
    #[error("{0} shares GPU memory that the image does not contain")]
    NotShared(String),
    #[error("{0} and another process of the image cannot be told apart")]
    Ambiguous(String),
    #[error(transparent)]
    Grant(#[from] GrantError),
    #[error(transparent)]
    Share(#[from] ShareError),
    #[error(
        "{0}: its container was given other GPUs than the image needs here: give the container those, or restore where the image's GPUs are the container's"
    )]
    OtherGpus(String),
    #[error("its processes share GPU memory, so restores load it when they begin")]
    SharesInAdvance,
    #[error("a GPU has {free} bytes free, and {needed} are needed to load content in advance and to restore it")]
    NoRoomInAdvance { needed: u64, free: u64 },
    #[error(transparent)]
    Native(#[from] NativeError),
    #[error("the command that held the processes until they may run has ended: they go on elsewhere, or not at all")]
    Abandoned,
    #[error(transparent)]
    NotHeld(#[from] NotHeld),
    #[error(transparent)]
    Arrival(#[from] ArrivalError),
    #[error("CRIU has died")]
    Orphaned,
    #[error(
        "{0} was killed before it was restored, so the restore has failed; if criu does not end by itself, kill it (docs/operating.md says why)"
    )]
    Died(String),
    #[error(
        "this image has {needed} GPU processes, {taken} are running already, and the daemon's configuration allows {max} (pool.max)"
    )]
    Full { needed: usize, taken: usize, max: usize },
    #[error("{0} is out of turn in this restore")]
    Order(&'static str),
    #[error("this restore has failed already: {0}")]
    Failed(Failure),
    #[error("cannot begin: {0}")]
    Io(#[from] std::io::Error),
}

impl From<Abandoned> for RestoreError {
    fn from(Abandoned: Abandoned) -> Self {
        Self::Abandoned
    }
}

impl Failing for RestoreError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Pid(error) => error.kind(),
            Self::Image(error) => failure::of_image(error),
            Self::Check(error) => error.kind(),
            Self::Library(error) => error.kind(),
            Self::Pool(error) => error.kind(),
            Self::Worker(_, error) => error.kind(),
            Self::Shared { source, .. } => source.kind(),
            Self::NoMemory(_) | Self::NotShared(_) | Self::Ambiguous(_) => FailureKind::BadImage,
            Self::Grant(error) => error.kind(),
            Self::Share(error) => error.kind(),
            Self::OtherGpus(_) | Self::Full { .. } | Self::SharesInAdvance | Self::NoRoomInAdvance { .. } => {
                FailureKind::Refused
            }
            Self::Native(error) => error.kind(),
            Self::Arrival(error) => error.kind(),
            Self::NotHeld(NotHeld::Io(error)) => Failing::kind(error),
            Self::NotHeld(NotHeld::By(_)) => FailureKind::Refused,
            Self::Abandoned | Self::Orphaned => FailureKind::GivenUp,
            Self::Died(_) => FailureKind::LostPeer,
            Self::NoDirectory | Self::NoConnection(_) | Self::Order(_) => FailureKind::Internal,
            Self::Failed(failure) => failure.kind,
            Self::Io(error) => Failing::kind(error),
        }
    }
}

//! Reasons why a request of the daemon is refused.

use std::io;

use rekindle_images::{ImageError, NoCompression};
use rekindle_wire::NotServed;
use rekindle_wire::control::{Failing, Failure, FailureKind, WorkerRequest};
use thiserror::Error;

use crate::checkpoint::copying::error::CopyError;
use crate::checkpoint::save_error::SaveError;
use crate::checkpoint::suspend::SuspendError;
use crate::gpu::driver::CallFailed;
use crate::resources::ipc::ShareError;
use crate::resources::job::EngineError;
use crate::resources::limits::NoRow;
use crate::resources::managed::ManagedError;
use crate::resources::memory::borrowed::TemplateError;
use crate::resources::not_loaded::NotLoaded;
use crate::schedule::rest::Broken;
use crate::session::failure;
use crate::session::outcome::Refused;

/// Reasons why a request of the daemon is refused.
#[derive(Debug, Error)]
pub(crate) enum Refusal {
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    Broken(#[from] Broken),
    #[error(transparent)]
    Row(#[from] NoRow),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Compression(#[from] NoCompression),
    #[error("{0}")]
    Io(io::Error),
    #[error("no thread for the client's connection: {0}")]
    NoThread(io::Error),
    /// The request, or an earlier message, lacked something. The text is a complete phrase.
    #[error("{0}")]
    Lacks(&'static str),
    #[error("no {0} came with the client")]
    Without(&'static str),
    #[error("the client's {what} is not a sealed memfd of {size} bytes")]
    NotSealed { what: &'static str, size: usize },
    #[error("the client's {0} cannot be mapped")]
    NotMapped(&'static str),
    #[error("the client's ring is not of version {0}, which it speaks")]
    OtherRing(u32),
    #[error(transparent)]
    Dialect(#[from] NotServed),
    #[error("pinned memory at {address:#x}: {error}")]
    Pinned { address: u64, error: Refused },
    #[error("{source} at {address:#x}")]
    PinnedMap { address: u64, source: CallFailed },
    #[error("{came} descriptors came for {files} data files")]
    Files { came: usize, files: usize },
    #[error("{0} is no hash")]
    NoHash(String),
    #[error("there is no code image {0}")]
    NoCode(String),
    #[error("it has gone on by itself, since the daemon was silent: dump it again")]
    WentOn,
    #[error("accesses are not reported: see `access.report` of the daemon")]
    Unreported,
    #[error("a worker that is {state} cannot do this: {request:?}")]
    Unfit { state: String, request: Box<WorkerRequest> },
    #[error("this worker has failed already: {0}")]
    Failed(Failure),
    #[error(transparent)]
    NotLoaded(#[from] NotLoaded),
    #[error(transparent)]
    Save(#[from] SaveError),
    #[error(transparent)]
    Content(#[from] EngineError),
    #[error(transparent)]
    Share(#[from] ShareError),
    #[error(transparent)]
    Suspend(#[from] SuspendError),
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error(transparent)]
    Managed(#[from] ManagedError),
    #[error(
        "its process is suspended deeply, and its worker only keeps it until another takes it over: resume it first (`rekindle resume`); a daemon of an older Rekindle cannot"
    )]
    Kept,
    #[error("the worker that keeps the process has not given it away: {0}")]
    NotGiven(io::Error),
    #[error("the worker's own code has no place: {0}")]
    Code(CallFailed),
    #[error("{0}")]
    Memory(Refused),
}

impl Failing for Refusal {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Copy(error) => error.kind(),
            Self::Broken(error) => error.kind(),
            Self::Image(error) => failure::of_image(error),
            Self::Io(error) | Self::NoThread(error) => Failing::kind(error),
            Self::NotLoaded(error) => error.kind(),
            Self::Save(error) => error.kind(),
            Self::Content(error) => error.kind(),
            Self::Share(error) => error.kind(),
            Self::Suspend(error) => error.kind(),
            Self::Template(error) => error.kind(),
            Self::Unreported | Self::Kept => FailureKind::Refused,
            Self::NotGiven(_) => FailureKind::LostPeer,
            Self::OtherRing(_) | Self::Dialect(_) => FailureKind::Version,
            Self::WentOn => FailureKind::Timeout,
            Self::Failed(failure) => failure.kind,
            _ => FailureKind::Internal,
        }
    }
}

//! Why a dump fails.

use rekindle_builds::BuildError;
use rekindle_ctx_worker::failure;
use rekindle_images::ImageError;
use rekindle_wire::control::{Failing, Failure, FailureKind};
use thiserror::Error;

use super::super::clients::{Client, Held};
use super::super::groups::TogetherError;
use super::super::ipc::SharingError;
use super::super::migrate::MigrationError;
use super::super::moment::MomentError;
use super::super::native::NativeError;
use super::super::pidns::PidError;
use super::super::pool::PoolError;
use super::super::quiesce::QuiesceError;
use super::super::suspend::SuspendError;
use super::super::worker::WorkerError;
use crate::limit::Limit;

/// Why a dump fails. The applications go on.
#[derive(Debug, Error)]
pub(in crate::daemon) enum DumpError {
    #[error("the image directory must come with the request")]
    NoDirectory,
    #[error(transparent)]
    Pid(#[from] PidError),
    #[error("cannot list the processes of the tree: {0}")]
    Tree(std::io::Error),
    #[error("process {root} {other} already, with the tree of process {}: wait until that is over", .other.root)]
    Overlaps { root: i32, other: Held },
    #[error(
        "{needed} bytes of GPU memory do not fit into {directory}, which has {free} bytes free{}: free some or dump elsewhere",
        if *.replaces { " beside the old image, which stays until the new one is complete" } else { "" }
    )]
    Space { needed: u64, free: u64, directory: String, replaces: bool },
    #[error(transparent)]
    Quiesce(#[from] QuiesceError),
    /// A suspended client does not resume.
    #[error(transparent)]
    Suspended(#[from] SuspendError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("{0} has lost its worker, and its GPU state with it: restart it")]
    LostWorker(String),
    #[error(
        "{name} runs under Rekindle, and has {device} mapped itself, which CRIU cannot dump: a library that it has loaded uses NVIDIA's \
         driver past Rekindle's, as OpenCL's does. Keep that library out of the process: MPI loads OpenCL's through hwloc, unless \
         HWLOC_COMPONENTS=-opencl is set"
    )]
    UsesDriver { name: String, device: String },
    /// A process of the tree has lost its worker; the text is a whole sentence.
    #[error("{0}")]
    WithoutWorker(String),
    #[error(transparent)]
    Sharing(#[from] SharingError),
    #[error(transparent)]
    Save(#[from] SaveError),
    #[error("CRIU has not dumped the connection of {0} to its worker: is the CRIU plugin of this version?")]
    NoSocket(String),
    #[error(
        "process {pid} still lacks pages of its memory after {limit}: `criu lazy-pages` has not brought them; see lazy-pages.log \
         in the image that was restored, and dump again"
    )]
    LacksPages { pid: i32, limit: Limit },
    #[error("{0} is out of turn in this dump")]
    Order(&'static str),
    #[error("{0} has ended while its memory was copied: dump again")]
    EndedMeanwhile(String),
    #[error("this dump has failed already: {0}")]
    Failed(Failure),
    #[error(transparent)]
    Moment(#[from] MomentError),
    #[error(transparent)]
    Together(#[from] TogetherError),
    #[error(transparent)]
    Migration(#[from] MigrationError),
    #[error(transparent)]
    Native(#[from] NativeError),
    #[error("the connection closed")]
    Closed,
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}

impl Failing for DumpError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Pid(error) => error.kind(),
            Self::Tree(error) | Self::Thread(error) => Failing::kind(error),
            Self::Space { .. } => FailureKind::NoSpace,
            Self::LacksPages { .. } => FailureKind::Timeout,
            Self::Quiesce(error) => error.kind(),
            Self::Suspended(error) => error.kind(),
            Self::Image(error) => failure::of_image(error),
            Self::LostWorker(_) | Self::EndedMeanwhile(_) => FailureKind::LostPeer,
            Self::WithoutWorker(_) | Self::Overlaps { .. } | Self::UsesDriver { .. } => FailureKind::Refused,
            Self::Sharing(error) => error.kind(),
            Self::Save(error) => error.kind(),
            Self::NoDirectory | Self::NoSocket(_) | Self::Order(_) => FailureKind::Internal,
            Self::Failed(failure) => failure.kind,
            Self::Moment(error) => error.kind(),
            Self::Together(error) => error.kind(),
            Self::Migration(error) => error.kind(),
            Self::Native(error) => error.kind(),
            Self::Closed => FailureKind::GivenUp,
        }
    }
}

/// Why there is no image.
#[derive(Clone, Debug, Error)]
#[error("{0}")]
pub(in crate::daemon) struct SaveError(Failure);

/// What to do after a rehearsal that has failed for such a reason.
fn after_rehearsal(kind: FailureKind) -> &'static str {
    match kind {
        // The driver places the code, or the heap of kernels, elsewhere, and would do so again.
        FailureKind::Refused => "it can be checkpointed when it has unloaded that code, or has been started anew",
        _ => {
            "dump it again; a rehearsal needs up to 512 MiB of free memory on the GPU, and as much again as the code and the heap of kernels take"
        }
    }
}

impl SaveError {
    pub(super) fn of(client: &Client, error: &WorkerError) -> Self {
        let error = client.explain(error.clone());
        Self(Failure::new(error.kind(), format!("{client} cannot be saved: {error}")))
    }

    /// A spare worker has not placed the client's code at its former addresses.
    pub(super) fn not_rehearsed(client: &Client, error: &WorkerError) -> Self {
        Self(Failure::new(
            error.kind(),
            format!(
                "{client} cannot be saved: a rehearsal has not placed its code where it is ({error}); {}",
                after_rehearsal(error.kind())
            ),
        ))
    }

    /// A spare worker has not loaded the client as a restore would.
    pub(super) fn not_restorable(client: &Client, error: &WorkerError) -> Self {
        Self(Failure::new(
            error.kind(),
            format!(
                "{client} cannot be saved: a rehearsal has shown that the image could not be restored here ({error}); an image is made \
                without a rehearsal if checkpoint.rehearse is false in the daemon's configuration"
            ),
        ))
    }

    /// There is no worker for a rehearsal.
    pub(super) fn no_rehearsal(client: &Client, error: &PoolError) -> Self {
        let reason =
            format!("{client} cannot be saved: its restore must be rehearsed, and there is no spare worker: {error}");
        Self(Failure::new(error.kind(), reason))
    }

    /// The image has made no progress for too long.
    pub(super) fn stalled(limit: Limit, awaited: &str) -> Self {
        let reason = format!("the image has made no progress for {limit}: it waits for {awaited}; the processes go on");
        Self(Failure::new(FailureKind::Timeout, reason))
    }

    /// An error that only a mistake in Rekindle can cause.
    pub(super) fn internal(reason: impl Into<String>) -> Self {
        Self(Failure::internal(reason))
    }

    /// The dump ends although part of the image is missing.
    pub(super) fn not_whole() -> Self {
        Self(Failure::new(FailureKind::GivenUp, "the dump ended before it was complete"))
    }

    /// The peer that wanted the dump does not wait for it any more.
    pub(super) fn given_up() -> Self {
        Self(Failure::new(FailureKind::GivenUp, "the dump was given up"))
    }
}

impl Failing for SaveError {
    fn kind(&self) -> FailureKind {
        self.0.kind
    }
}

impl From<ImageError> for SaveError {
    fn from(error: ImageError) -> Self {
        Self(Failure::new(failure::of_image(&error), error.to_string()))
    }
}

impl From<BuildError> for SaveError {
    fn from(error: BuildError) -> Self {
        Self(Failure::internal(format!("the image cannot carry Rekindle's libraries: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_rehearsal_that_lacked_something_the_dump_can_be_repeated_at_once() {
        assert!(after_rehearsal(FailureKind::Refused).contains("unloaded that code"));
        for kind in [FailureKind::Internal, FailureKind::Timeout, FailureKind::LostPeer] {
            assert!(after_rehearsal(kind).contains("free memory on the GPU"));
        }
    }
}

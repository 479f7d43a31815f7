//! Why a client is not suspended or resumed.

use rekindle_images::ImageError;
use rekindle_wire::control::{Failing, FailureKind};
use thiserror::Error;

use super::super::clients::{Client, Held};
use super::super::pidns::PidError;
use super::super::quiesce::QuiesceError;
use super::super::rehearsal::RehearsalError;
use super::super::worker::WorkerError;
use super::moved::{CodeError, MoveError};
use crate::limit::Limit;

/// Why clients are not suspended or resumed. Those that were to be suspended go on.
#[derive(Debug, Error)]
pub(crate) enum SuspendError {
    #[error(transparent)]
    Pid(#[from] PidError),
    #[error("process {0} does not exist, or is not yours")]
    NoProcess(i32),
    #[error("no process of the tree of {0} uses a GPU through Rekindle: see `rekindle ps`")]
    NoClient(i32),
    #[error(
        "only root and the user that rekindled runs as, on the host itself, may name a directory: suspend to memory instead"
    )]
    DirectoryNotAllowed,
    #[error("cannot list the processes of the tree: {0}")]
    Tree(std::io::Error),
    #[error("process {root} {other} already, with the tree of process {}: wait until that is over", .other.root)]
    Overlaps { root: i32, other: Held },
    #[error(
        "{needed} bytes of GPU memory do not fit into {what}, which has {free} bytes free: suspend to a directory with more room (--to DIR)"
    )]
    Space { what: &'static str, needed: u64, free: u64 },
    #[error(
        "{client} shares GPU memory with other processes, which use it: end the sharing, or checkpoint the processes together"
    )]
    Shared { client: String },
    #[error(
        "the worker of {client} is of an older Rekindle and cannot suspend it: restart the program, or checkpoint it"
    )]
    OldWorker { client: String },
    #[error("cannot make a file for the content of GPU memory: {0}")]
    File(std::io::Error),
    #[error("no random key: {0}")]
    Key(ImageError),
    #[error(transparent)]
    Quiesce(#[from] QuiesceError),
    #[error("{client} cannot be suspended: {source}; it goes on")]
    Client { client: String, source: WorkerError },
    #[error("{client} cannot be suspended: its memory was not copied any further for {limit}; it goes on")]
    Stalled { client: String, limit: Limit },
    #[error(
        "{client} cannot resume: its GPU has had no room for {bytes} bytes for {limit}; it goes on by itself when there is room"
    )]
    NoRoom { client: String, bytes: u64, limit: Limit },
    #[error("{client} has work to do, and goes on")]
    HasWork { client: String },
    /// The client for whom others were to be suspended does not wait any more.
    #[error("{0}")]
    NotWanted(String),
    #[error("{client} cannot resume: {source}; it stays suspended")]
    NotMoved { client: String, source: MoveError },
    #[error("{client} cannot be suspended deeply: {source}; it goes on")]
    Code { client: String, source: CodeError },
    #[error("{client} cannot be suspended deeply: {source}; it goes on, and can be suspended without --deep")]
    NotRehearsed { client: String, source: RehearsalError },
    #[error("{client} cannot resume: {source}")]
    NotResumed { client: String, source: WorkerError },
}

impl SuspendError {
    /// A client that is not suspended because of its worker's error.
    pub(crate) fn of(client: &Client, source: WorkerError) -> Self {
        Self::Client { client: client.to_string(), source: client.explain(source) }
    }

    /// A client that does not resume because of its worker's error.
    pub(super) fn not_resumed(client: &Client, source: WorkerError) -> Self {
        Self::NotResumed { client: client.to_string(), source: client.explain(source) }
    }
}

impl Failing for SuspendError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Pid(error) => error.kind(),
            Self::NoProcess(_)
            | Self::NoClient(_)
            | Self::DirectoryNotAllowed
            | Self::Overlaps { .. }
            | Self::Shared { .. }
            | Self::HasWork { .. }
            | Self::NotWanted(_)
            | Self::NoRoom { .. } => FailureKind::Refused,
            Self::OldWorker { .. } => FailureKind::Version,
            Self::Tree(error) | Self::File(error) => Failing::kind(error),
            Self::Key(_) => FailureKind::Internal,
            Self::Space { .. } => FailureKind::NoSpace,
            Self::Quiesce(error) => error.kind(),
            Self::NotMoved { source, .. } => source.kind(),
            Self::Code { source: CodeError::Worker(error), .. } => error.kind(),
            Self::Code { source: CodeError::Io(error), .. } => Failing::kind(error),
            Self::NotRehearsed { source, .. } => source.kind(),
            Self::Client { source, .. } | Self::NotResumed { source, .. } => match source.kind() {
                // Damage to the content that a suspension keeps: no image is concerned.
                FailureKind::BadImage => FailureKind::Internal,
                kind => kind,
            },
            Self::Stalled { .. } => FailureKind::Timeout,
        }
    }
}

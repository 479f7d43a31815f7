//! Why an image is not kept warm.

use rekindle_ctx_worker::failure;
use rekindle_images::ImageError;
use rekindle_wire::control::{Failing, FailureKind};
use thiserror::Error;

use super::super::check::CheckError;

/// Why an image is not kept warm.
#[derive(Debug, Error)]
pub(in crate::daemon) enum WarmError {
    #[error("the image directory must come with the request")]
    NoDirectory,
    #[error("bad image: {0}")]
    Image(#[from] ImageError),
    #[error(transparent)]
    Check(#[from] CheckError),
    #[error(
        "the image takes {needed} bytes, and warm images together may have {budget} bytes of host memory: raise warm.memory_mib in the daemon's configuration"
    )]
    OverBudget { needed: u64, budget: u64 },
    #[error(
        "the image takes {needed} bytes, and the host has {free} bytes of free memory: free some, or forget another warm image"
    )]
    NoMemory { needed: u64, free: u64 },
    #[error("cannot keep content in host memory: {0}")]
    Memory(std::io::Error),
    #[error("cannot copy the image into host memory: {0}")]
    Copy(std::io::Error),
    #[error(
        "processes of container {0} do not share GPU memory with other instances of their image: start the container with --annotation dev.rekindle/share=true before it is checkpointed, or say --resident=once"
    )]
    NotToBeShared(String),
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    #[error("the image in this directory is not warm: `rekindle warm` lists those that are")]
    NotWarm,
    #[error("no image with the id or from the directory {0} is warm: `rekindle warm` lists those that are")]
    Unknown(String),
}

impl Failing for WarmError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::NoDirectory => FailureKind::Internal,
            Self::Image(error) => failure::of_image(error),
            Self::Check(error) => error.kind(),
            Self::OverBudget { .. } | Self::NotToBeShared(_) | Self::NotWarm | Self::Unknown(_) => FailureKind::Refused,
            Self::NoMemory { .. } => FailureKind::NoSpace,
            Self::Memory(error) | Self::Copy(error) | Self::Thread(error) => Failing::kind(error),
        }
    }
}

//! Why a native process is not checkpointed, or not restored.

use rekindle_wire::control::{Failing, FailureKind};
use thiserror::Error;

use super::helper::HelperError;
use crate::limit::Limit;

/// Why a native process is not checkpointed, or not restored.
#[derive(Debug, Error)]
pub(crate) enum NativeError {
    #[error(
        "{name} uses {device} through the driver itself, and is dumped by the driver's own checkpoint only, which cannot be used here: {source}"
    )]
    Unusable { name: String, device: String, source: HelperError },
    #[error(transparent)]
    Helper(#[from] HelperError),
    #[error("{name}: {source}")]
    Call { name: String, source: HelperError },
    #[error(
        "{name} is {state} already, and was not by Rekindle: does CRIU's cuda_plugin, or cuda-checkpoint, work on it? unlock it, as with `cuda-checkpoint --action unlock --pid`, and dump again"
    )]
    NotRunning { name: String, state: &'static str },
    #[error(
        "{name} cannot be locked: its GPU work has not ended after {limit}, and may wait for another process; it goes on"
    )]
    Busy { name: String, limit: Limit },
    #[error("{name} is in state {number} of the driver, which this version does not know")]
    UnknownState { name: String, number: i32 },
    #[error("{0} has lost its GPU memory: the driver's checkpoint has failed")]
    Failed(String),
    #[error("{name} was killed: {reason}")]
    Killed { name: String, reason: String },
    #[error("process {0} was not locked in this dump")]
    NotHeld(i32),
    #[error("{name}: the next daemon could not unlock it, since no record can be kept: {source}")]
    Record { name: String, source: std::io::Error },
    #[error("{name}: the driver names thread {tid} of it, which it does not have")]
    NoThread { name: String, tid: i32 },
    #[error(
        "the image's processes use the driver by themselves, and this CRIU's Rekindle plugin is older than that: install one version of Rekindle for all parts"
    )]
    OldPlugin,
    #[error(
        "{name} was checkpointed by a driver of {was}, and it is {is} here: restore with the former driver, or allow another (rekindle restore --allow-other-driver, or restore.allow_other_driver in the daemon's configuration)"
    )]
    OtherDriver { name: String, was: String, is: String },
    #[error(
        "{name} was checkpointed on a machine with the GPUs {was}, and here are {is}: restore where there is another GPU of the same model for each"
    )]
    OtherGpus { name: String, was: String, is: String },
}

impl Failing for NativeError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Helper(source) | Self::Unusable { source, .. } | Self::Call { source, .. } => source.kind(),
            Self::Busy { .. } => FailureKind::Timeout,
            Self::NotRunning { .. } | Self::OtherDriver { .. } | Self::OtherGpus { .. } => FailureKind::Refused,
            Self::OldPlugin => FailureKind::Version,
            Self::Killed { .. } => FailureKind::LostPeer,
            Self::UnknownState { .. } | Self::Failed(_) | Self::NotHeld(_) | Self::NoThread { .. } => {
                FailureKind::Internal
            }
            Self::Record { source, .. } => Failing::kind(source),
        }
    }
}

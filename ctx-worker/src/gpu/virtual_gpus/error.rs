//! Why virtual GPUs cannot be shown.

use rekindle_wire::window::MAX_DEVICES;
use thiserror::Error;

use crate::gpu::driver::CallFailed;

/// Why virtual GPUs cannot be shown.
#[derive(Debug, Error)]
pub(crate) enum VirtualError {
    #[error(transparent)]
    Driver(#[from] CallFailed),
    #[error(
        "gpu.virtual = {per_gpu} shows {gpus} GPUs as {}, and a process can have {MAX_DEVICES}: lower gpu.virtual in the daemon's configuration",
        .gpus * *.per_gpu as usize
    )]
    TooMany { gpus: usize, per_gpu: u32 },
    #[error("there is no virtual GPU {0} here")]
    Unknown(String),
    #[error("this process shows virtual GPUs already")]
    Twice,
}

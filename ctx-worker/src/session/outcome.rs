//! How a command of the client's ends.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Malformed;
use thiserror::Error;

/// Why a command was not handed to the driver.
#[derive(Clone, Copy, Debug, Error)]
pub(crate) enum Refused {
    /// It is no command: the client is broken or hostile.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// As above.
    #[error("no call has the number {0}")]
    UnknownCall(u16),
    /// It names what does not exist, or cannot be done; the code is the client's answer.
    #[error("{}", result_name(*.0))]
    Code(CUresult),
}

/// How a command ended.
pub(crate) enum Outcome {
    /// With this result.
    Done(CUresult),
    /// It waits, and answers later.
    Later,
}

/// Success, or the code as the command's end.
pub(crate) fn check(code: CUresult) -> Result<(), Refused> {
    if code == CUDA_SUCCESS { Ok(()) } else { Err(Refused::Code(code)) }
}

//! How a command of the client's ends.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Malformed;
use thiserror::Error;

/// Why a command was not handed to the driver.
#[derive(Clone, Copy, Debug, Error)]
pub(crate) enum Refused {
    /// The bytes are no command: the client is broken or hostile.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// No call has this number: the client is broken or hostile.
    #[error("no call has the number {0}")]
    UnknownCall(u16),
    /// The command names an object that does not exist, or cannot be executed; the code is the client's answer.
    #[error("{}", result_name(*.0))]
    Code(CUresult),
}

/// How a command ended.
pub(crate) enum Outcome {
    /// The command is done, with this result.
    Done(CUresult),
    /// The command waits, and answers later.
    Later,
}

/// Success, or a refusal with this code.
pub(crate) fn check(code: CUresult) -> Result<(), Refused> {
    if code == CUDA_SUCCESS { Ok(()) } else { Err(Refused::Code(code)) }
}

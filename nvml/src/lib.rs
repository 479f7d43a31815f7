//! The `libnvidia-ml.so.1` that applications load. It answers the queries of PyTorch, NCCL and monitoring programs for the GPUs
//! that the process may see. It has no GPU state and no worker.
//!
//! ```text
//!   application ── nvmlXxx ──> exported symbol (generated) ─┬─> api::nvmlXxx ── facts from nvmlInit         (local)
//!                                                           │        └───────── daemon::ask: GpuMemory, ...
//!                                                           ├─> ask ── daemon::ask: GpuAsk ── the machine's NVML
//!                                                           └─> refuse: NVML_ERROR_NOT_SUPPORTED
//! ```
//!
//! Each question has a connection of its own, which closes after the answer. So a checkpoint between two calls has only memory
//! to save, and a restart of the daemon goes unnoticed.

#![deny(clippy::print_stderr, clippy::print_stdout, clippy::dbg_macro, reason = "they panic when stderr is closed")]
#![allow(non_snake_case, reason = "exported symbols have NVIDIA's names")]

mod api;
mod daemon;
mod result;
mod state;

use rekindle_cuda_abi::nvml::{MAX_BUFFER, Shape, versioned_size};
use rekindle_wire::control::{Reply, Request};
use rekindle_wire::nvml::{Argument, Question};

use crate::result::*;

/// The exported symbols.
#[allow(clippy::all, clippy::undocumented_unsafe_blocks, missing_docs, unreachable_pub, reason = "generated")]
mod exports {
    use rekindle_cuda_abi::nvml::Shape;
    use std::ffi::{c_char, c_void};
    include!(concat!(env!("OUT_DIR"), "/exports.rs"));
}

/// Marks this library: the daemon must not load it instead of the machine's.
#[unsafe(no_mangle)]
pub static rekindle_nvml: u8 = 1;

/// The result of a call, `Err` with its `nvmlReturn_t`.
type Answered = Result<(), u32>;

/// Runs an exported function's body; a panic becomes `NVML_ERROR_UNKNOWN`, since nothing may unwind into C.
fn entry(body: impl FnOnce() -> Answered) -> u32 {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(error)) => error,
        Err(_) => ERROR_UNKNOWN,
    }
}

/// The answer of a function that is not implemented.
fn refuse(_function: &str) -> Answered {
    state::facts()?;
    Err(ERROR_NOT_SUPPORTED)
}

/// Asks the machine's NVML through the daemon. `values` are the parameters as words, in the order of `shapes`.
///
/// # Safety
/// Pointers among them are null, or valid for the bytes that nvml.h states.
unsafe fn ask(function: &str, shapes: &[Shape], values: &[u64]) -> Answered {
    let facts = state::facts()?;
    let mut arguments = Vec::new();
    let mut pointers = Vec::new();
    for (shape, value) in shapes.iter().zip(values) {
        let (size, read) = match shape {
            Shape::Device => {
                let (gpu, _) = facts.gpu(*value as usize)?;
                arguments.push(Argument::Device(gpu));
                continue;
            }
            Shape::Number => {
                arguments.push(Argument::Number(*value));
                continue;
            }
            _ if *value == 0 => return Err(ERROR_INVALID_ARGUMENT),
            Shape::Bytes(size) => (*size, false),
            Shape::Versioned => {
                // SAFETY: not null, so a structure that begins with its version by the caller's promise.
                let version = unsafe { (*value as *const u32).read_unaligned() };
                (versioned_size(version).ok_or(ERROR_ARGUMENT_VERSION_MISMATCH)?, true)
            }
            Shape::Many { count, each } => {
                let count = values.get(*count).and_then(|count| usize::try_from(*count).ok());
                let size = count.and_then(|count| count.checked_mul(*each)).filter(|size| *size <= MAX_BUFFER);
                (size.filter(|size| *size > 0).ok_or(ERROR_INVALID_ARGUMENT)?, *each > 8)
            }
        };
        let at = *value as *mut u8;
        let mut bytes = vec![0; size];
        if read {
            // SAFETY: the caller's promise, with the size that the structure or the count states.
            unsafe { std::ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), size) };
        }
        arguments.push(Argument::Buffer(bytes));
        pointers.push((at, size));
    }
    let question = Question { function: function.to_owned(), arguments };
    let answer = match daemon::ask(&Request::GpuAsk(question))? {
        Reply::GpuAnswer(answer) => answer,
        _ => return Err(ERROR_UNKNOWN),
    };
    // A call that fails may write results too (field values, the size that it needs).
    for ((at, size), bytes) in pointers.into_iter().zip(&answer.buffers) {
        if bytes.len() != size {
            return Err(ERROR_UNKNOWN);
        }
        // SAFETY: the buffer has `size` bytes by the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, size) };
    }
    if answer.result == SUCCESS { Ok(()) } else { Err(answer.result) }
}

//! The interposer: the `libcuda.so.1` that applications load. It has no GPU state at all. Calls are answered here, or
//! travel through a ring of shared memory to the worker that owns the contexts.
//!
//! ```text
//!   application ── cuXxx ──> exported symbol (generated) ──> api::cuXxx ──> state (contexts, memory, functions)
//!                                                    └─────> remote::cuXxx ─┐      │
//!                                                                           v      v
//!                                                               client::Call ──> ring ──> worker
//! ```
//!
//! Life of a process here:
//!
//! ```text
//!   UNUSED ──cuInit──> ATTACHED ──worker dies──> every call fails, sticky
//!                         └──────fork──────────> FORKED: not initialised, as with the real driver
//! ```
//!
//! Everything in the process, this library's state included, is saved and restored by CRIU as ordinary memory.

#![deny(clippy::print_stderr, clippy::print_stdout, clippy::dbg_macro, reason = "they panic where nobody reads")]
#![allow(non_snake_case, reason = "exported symbols have NVIDIA's names")]

mod api;
mod call;
mod connection;
mod copy;
mod copy_box;
mod graphs;
mod moment;
mod private;
mod process;
mod start;
mod state;
mod times;

use rekindle_cuda_abi::types::*;

use crate::connection::counts;
use crate::process::calling_thread::with_thread_stream;
use crate::process::log;

/// The exported symbols, their addresses, and the look-up table of `cuGetProcAddress`.
#[allow(clippy::all, clippy::undocumented_unsafe_blocks, missing_docs, unreachable_pub, reason = "generated")]
mod exports {
    use rekindle_cuda_abi::types::*;
    use std::ffi::{c_char, c_void};
    include!(concat!(env!("OUT_DIR"), "/exports.rs"));
}

/// Runs an exported function's body; a panic becomes `CUDA_ERROR_UNKNOWN`, since nothing may unwind into C.
#[inline]
fn entry(function: u16, body: impl FnOnce() -> CUresult) -> CUresult {
    counts::asked(function);
    let begun = times::begin();
    let body = || match rekindle_graphs::hook::before(exports::SYMBOLS[function as usize].0) {
        Ok(()) => body(),
        Err(forbidden) => forbidden,
    };
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(CUDA_ERROR_UNKNOWN);
    if result != CUDA_SUCCESS {
        if result == CUDA_ERROR_NOT_SUPPORTED {
            counts::refused(function);
        }
        log::failed(exports::SYMBOLS[function as usize].0, result);
    }
    times::end(function, begun);
    result
}

/// The answer of a function that is not implemented.
fn refuse(function: u16) -> CUresult {
    entry(function, || {
        log::refused(exports::SYMBOLS[function as usize].0);
        CUDA_ERROR_NOT_SUPPORTED
    })
}

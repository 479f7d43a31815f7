//! The interposer: the `libcuda.so.1` that applications load. It has no GPU state at all. It answers calls itself, or sends
//! them through a ring of shared memory to the worker that owns the contexts.
//!
//! ```text
//!   application ── cuXxx ──> exported symbol (generated) ──> api::cuXxx ──> state (contexts, memory, functions)
//!                                                    └─────> call::remote::cuXxx ─┐      │
//!                                                                                 v      v
//!                                                                           call::Call ──> ring ──> worker
//! ```
//!
//! The life of a process here (`start.rs`):
//!
//! ```text
//!   UNUSED ──cuInit──> ATTACHED ──worker dies──> every call fails, sticky
//!                         └──────fork──────────> FORKED: not initialised, as with the real driver
//! ```
//!
//! The files lie in layers. A file imports from its own layer and from those above it in this table.
//!
//! | layer | holds |
//! |---|---|
//! | `process/` | the calling thread, helper threads, the process's mappings, its log |
//! | `connection/` | attaching to a worker, commands and their replies, the bounce buffer, kernels' output, counts of calls, questions to the daemon |
//! | `state/` | everything that the process keeps: `Client`, with contexts, memory, functions, streams and the like |
//! | `call.rs` | `Call`, which takes a driver call to the worker, and the calls that the driver table alone describes |
//! | `operations/` | what driver functions and graphs are made of: launches, copies, memsets, callbacks, memory |
//! | `graphs/` | graphs, as `rekindle-graphs` wants them launched |
//! | `start.rs` | `cuInit`, the end of a thread, a fork |
//! | `api/` | the driver's functions |
//! | `lib.rs` | the exported symbols, and how long their calls take (`times.rs`) |
//!
//! The life of a launch: `cuLaunchKernel` in `api/launch.rs`, `launch` in `operations/launch.rs`, `Call` in `call.rs`,
//! `Command` in `connection/command.rs`.
//!
//! CRIU saves and restores everything in the process, this library's state included, as ordinary memory.

#![deny(clippy::print_stderr, clippy::print_stdout, clippy::dbg_macro, reason = "they panic when stderr is closed")]
#![allow(non_snake_case, reason = "exported symbols have NVIDIA's names")]

mod api;
mod call;
mod connection;
mod graphs;
mod operations;
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
        log::unsupported(exports::SYMBOLS[function as usize].0);
        CUDA_ERROR_NOT_SUPPORTED
    })
}

//! A software GPU: a `libcuda.so.1` that runs on the CPU, for tests.
//!
//! Programs built by nvcc find it through `LD_LIBRARY_PATH` and run on it: their PTX is interpreted, kernels of different
//! streams run at the same time, and errors are those of the driver. The library refuses unsupported calls with
//! `CUDA_ERROR_NOT_SUPPORTED`. `config` lists the environment variables that shape the devices, `fault` how faults are
//! injected.
//!
//! An exported symbol passes `process::entry` and calls the function of its name in `api/`. A file imports from its own
//! layer and from those above it in this table.
//!
//! | layer | holds |
//! |---|---|
//! | `config`, `status`, `fault`, `handles` | the environment, error codes, injected faults, the table of handles |
//! | `memory/account`, `pages`, `space`, `heap`; `pool` | addresses, their pages, access to them; pools as numbers |
//! | `device`, `attributes` | the devices |
//! | `element`, `array`, `texture`, `channel`, `order`, `execution/print`, `execution/malloc` | the parts of a context |
//! | `context` | the parts and the error of a context |
//! | `memory/pinned`, `vmm`, `ipc` | memory that is not a heap's |
//! | `stream`, `streams`, `stream_ordered`, `ipc_event`, `event` | queues with a thread each, and moments in them |
//! | `contexts`, `current` | the life of contexts; the current one of each thread |
//! | `merge`, `image`, `module`, `library` | code |
//! | `copy`, `word`, `execution/launch` | the commands of streams |
//! | `checkpoint/` | the checkpoint of this process by another, and of another by this one |
//! | `graphs`, `host`, `process` | the services that graphs and private tables need; the life of the process |
//! | `api/` | the driver functions |

mod api;
mod array;
mod attributes;
mod blocks;
mod channel;
mod checkpoint;
mod config;
mod context;
mod contexts;
mod copy;
mod current;
mod device;
mod element;
mod event;
mod execution;
mod fault;
mod graph_parts;
mod graph_steps;
mod graphs;
mod green;
mod handles;
mod host;
mod image;
mod ipc_event;
mod library;
mod memory;
mod merge;
mod module;
mod order;
mod pool;
mod process;
mod status;
mod stream;
mod stream_ordered;
mod streams;
mod texture;
mod word;

pub(crate) use current::with_thread_stream;
pub(crate) use process::{entry, refuse};

/// The symbols of `libcuda.so.1`, generated from the table of driver functions.
#[allow(missing_docs, non_snake_case, unreachable_pub, reason = "generated; the names are cuda.h's")]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks, unused_unsafe, reason = "generated")]
mod exports {
    use std::ffi::{c_char, c_void};

    use rekindle_cuda_abi::types::*;

    include!(concat!(env!("OUT_DIR"), "/exports.rs"));
}

//! CUDA graphs and stream capture, as `cuda.h` documents them, without any GPU.
//!
//! Two libraries have this crate inside: the interposer, whose process keeps its graphs by it, and the software GPU.
//! What each does with a graph that is launched is behind [`Driver`].
//!
//! ```text
//!   cuGraph...        ─► api ─► Store: graphs, executable graphs, user objects, memory of graphs
//!   cuStream...Capture      ─► capture: which streams record into which graph
//!   any call in a stream    ─► hook: is the stream capturing? Then the call becomes a node
//!   instantiate, launch     ─► exec: a copy with children unfolded ([`Flat`]) ─► Driver
//! ```
//!
//! A capture:
//!
//! ```text
//!   begin ──> ACTIVE ──end of the stream it began in──> a graph
//!                │ what is not allowed, in the stream or in a thread (by the modes)
//!                └──> INVALIDATED ──end──> CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, no graph
//! ```
//!
//! Error codes are those that driver 580 was seen to give.

#![allow(non_snake_case, reason = "the functions have cuda.h's names")]

pub mod api;
mod capture;
mod dot;
mod driver;
mod exec;
mod graph;
pub mod hook;
mod memory;
mod store;
mod task;
mod user;

pub use capture::{Mode, StreamKey};
pub use driver::{Driver, KernelFacts, Role, Stream, register};
pub use exec::{Flat, Step};
pub use task::{Copy, Fill, Host, Kernel, Task, Words};

/// What a call answers with.
pub type Result<T> = std::result::Result<T, rekindle_cuda_abi::types::CUresult>;

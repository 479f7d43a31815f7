//! CUDA graphs and stream capture, as `cuda.h` documents them, without any GPU.
//!
//! Two libraries contain this crate: the interposer, which keeps its process's graphs with this crate, and the software
//! GPU. Each of them implements [`Driver`], which executes a graph that is launched.
//!
//! ```text
//!   cuGraph...              ─► api ─► graphs: nodes, edges, user objects, memory of graphs
//!   cuStream...Capture      ─► api ─► capture: which streams record into which graph
//!   any call in a stream    ─► hook: is the stream capturing? Then the call becomes a node
//!   instantiate, launch     ─► api ─► exec: a copy with children unfolded ([`Flat`]) ─► Driver
//! ```
//!
//! A file imports only from lines below its own:
//!
//! ```text
//!   api                     the driver's functions
//!   hook
//!   store                   graphs, executable graphs and captures of a process, and the lock around them
//!   exec, capture, dot      each works on the graphs that the caller hands to it
//!   conditions              the conditions of graphs, and the nodes that look at them
//!   graphs                  all graphs, with the memory and the user objects that they hold
//!   graph, memory, user     one graph; all memory of graphs; all user objects
//!   condition               one condition of a graph, and the values of all
//!   driver                  the library around this crate
//!   steps                   a graph as it is launched
//!   task, handles           what a node does
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
//! Error codes are the codes that driver 580 was seen to give.

#![allow(non_snake_case, reason = "the functions have cuda.h's names")]

pub mod api;
mod capture;
mod condition;
mod conditions;
mod dot;
mod driver;
mod exec;
mod graph;
mod graphs;
mod handles;
pub mod hook;
mod memory;
mod steps;
mod store;
mod task;
mod user;

pub use capture::Mode;
pub use condition::Values;
pub use driver::{Driver, KernelFacts, Role, Stream, StreamKey, register};
pub use steps::{Flat, Step};
pub use task::{Conditional, Copy, Fill, Host, Kernel, Task, Words};

/// The answer of a call.
pub type Result<T> = std::result::Result<T, rekindle_cuda_abi::types::CUresult>;

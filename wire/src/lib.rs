//! The protocols between Rekindle's parts. The parts themselves decide when they connect, and to which other part.
//!
//! ```text
//!   interposer ═══ ring (shared memory: commands, replies) ════ worker
//!        └──────── connection (memfds, and word of death) ────────┘      attach
//!   interposer ─── control socket ── daemon ── worker's channel ── worker  control
//!   plugin, hook, command line ── control socket ── daemon                 control
//! ```
//!
//! - [`layout`]: the shared memory that a client and its worker map
//! - [`ring`]: the command ring in it, with one total order
//! - [`reply`]: the slots in which a waiting call sleeps
//! - [`standstill`]: a process that stops its own threads, and CRIU, which stops them too, take turns
//! - [`codec`], [`command`]: how a call and its parameters look in the ring
//! - [`graph`]: the steps of executable graphs
//! - [`calls`]: how often a client asks for each driver call
//! - [`window`]: the addresses that device and pinned memory take on both sides, and [`free_ranges`], which of them are free
//! - [`attach`]: how a process gets a worker, and the messages on their connection afterwards
//! - [`control`]: messages on the daemon's socket, and [`frame`], how they are framed
//! - [`gpus`]: how GPUs are named
//! - [`ipc`]: memory that processes share
//! - [`lazy_pages`]: restores whose processes lack pages of their own
//! - [`native`]: what the daemon asks the helper that calls the driver's checkpoint
//! - [`nvml`]: questions to NVML, on the same socket
//! - [`userfault`]: how a worker learns that its client uses managed memory
//! - [`descriptor`], [`stderr`]: descriptors that libraries in applications keep open, and their messages
//! - [`version`]: which releases of the parts serve each other
//!
//! The receiver checks every message: a worker does not trust the application.
//!
//! A file imports only from lines below its own:
//!
//! ```text
//!   control
//!   gpus              ring, reply, calls, standstill, lazy_pages      command, graph
//!   attach, frame     layout, with model, futex, sync     boxes
//!   version                                               codec
//!
//!   by themselves: access, descriptor, free_ranges, ipc, native, nvml, stderr, tensor_map, userfault, window
//! ```

pub mod access;
pub mod attach;
pub mod boxes;
pub mod calls;
pub mod codec;
pub mod command;
pub mod control;
pub mod descriptor;
pub mod frame;
pub mod free_ranges;
pub mod futex;
pub mod gpus;
pub mod graph;
pub mod ipc;
pub mod layout;
pub mod lazy_pages;
#[cfg(feature = "model")]
mod model;
pub mod native;
pub mod nvml;
pub mod reply;
pub mod ring;
pub mod standstill;
pub mod stderr;
mod sync;
pub mod tensor_map;
pub mod userfault;
pub mod version;
pub mod window;

pub use version::{CLIENT_VERSION, CONTROL_VERSION, Dialect, NotServed, OLDEST_CLIENT, OLDEST_CONTROL, VARIABLES};

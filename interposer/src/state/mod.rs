//! The state of the process: devices, contexts, allocations, functions, streams. [`client::Client`] has all of it.

pub(crate) mod arrays;
pub(crate) mod client;
pub(crate) mod contexts;
pub(crate) mod coredumps;
pub(crate) mod devices;
pub(crate) mod events;
pub(crate) mod functions;
pub(crate) mod green;
pub(crate) mod idle;
pub(crate) mod ipc;
pub(crate) mod managed;
pub(crate) mod memory;
pub(crate) mod pools;
pub(crate) mod stream_attributes;
pub(crate) mod streams;
pub(crate) mod variables;
pub(crate) mod vmm;

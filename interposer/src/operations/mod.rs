//! Operations that the driver's functions and launches of graphs are made of: launches, copies, memsets, callbacks, words,
//! events, and memory.

pub(crate) mod boxes;
pub(crate) mod callback;
pub(crate) mod code;
pub(crate) mod copy;
mod copy_box;
pub(crate) mod device_memory;
pub(crate) mod event;
pub(crate) mod fill;
pub(crate) mod function;
pub(crate) mod host_box;
pub(crate) mod launch;
pub(crate) mod managed;
pub(crate) mod moving;
pub(crate) mod pinned;
pub(crate) mod shared_memory;
pub(crate) mod stream;
pub(crate) mod variables;
pub(crate) mod words;

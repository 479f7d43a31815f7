//! What a client makes of the GPU: memory of every kind, and code.

pub(crate) mod arrays;
pub(crate) mod boxes;
pub(crate) mod code;
pub(crate) mod code_store;
pub(crate) mod device;
pub(crate) mod graphs;
pub(crate) mod initial;
pub(crate) mod ipc;
pub(crate) mod ipc_events;
pub(crate) mod jit;
pub(crate) mod job;
pub(crate) mod launch_attributes;
pub(crate) mod limits;
pub(crate) mod linker;
pub(crate) mod memory;
pub(crate) mod not_loaded;
pub(crate) mod occupancy;
pub(crate) mod peers;
pub(crate) mod pinned;
pub(crate) mod pool_commands;
pub(crate) mod pools;
pub(crate) mod prints;
pub(crate) mod tensor_maps;
pub(crate) mod textures;
pub(crate) mod units;
pub(crate) mod vmm;

//! The driver's functions, by their exported names. `cuda.h` describes them; comments here add only to that.
//!
//! The library refuses other functions with `CUDA_ERROR_NOT_SUPPORTED`: texture references, views of textures, external
//! memory, multicast. To export a function, add it to a file of this folder.
//!
//! Parameter types carry the C caller's promises about its pointers ([`rekindle_cuda_abi::arguments`]), so most functions are
//! safe. A function is unsafe where `cuda.h` leaves the type or the length of pointed-to memory to another argument, or to code
//! of the caller's. The *caller's promise* in safety comments is that the arguments are as `cuda.h` wants them.

#![allow(non_snake_case, unreachable_pub, clippy::too_many_arguments, reason = "the names and signatures are cuda.h's")]

mod array;
mod batch;
mod boxes;
mod checkpoint;
mod context;
mod copy;
mod coredump;
mod decompress;
mod device;
mod event;
mod fill;
mod function;
mod green;
mod ipc;
mod launch;
mod legacy;
mod library;
mod linker;
mod logs;
mod managed;
mod memory;
mod mipmap;
mod module;
mod occupancy;
mod pinned;
mod pointer;
mod pools;
mod start;
mod stream;
mod stream_attribute;
mod stream_memory;
mod tensor_map;
mod texture;
mod vmm;

pub use array::*;
pub use batch::*;
pub use boxes::*;
pub use checkpoint::*;
pub use context::*;
pub use copy::*;
pub use coredump::*;
pub use decompress::*;
pub use device::*;
pub use event::*;
pub use fill::*;
pub use function::*;
pub use green::*;
pub use ipc::*;
pub use launch::*;
pub use legacy::*;
pub use library::*;
pub use linker::*;
pub use logs::*;
pub use managed::*;
pub use memory::*;
pub use mipmap::*;
pub use module::*;
pub use occupancy::*;
pub use pinned::*;
pub use pointer::*;
pub use pools::*;
pub use start::*;
pub use stream::*;
pub use stream_attribute::*;
pub use stream_memory::*;
pub use tensor_map::*;
pub use texture::*;
pub use vmm::*;

pub use rekindle_graphs::api::*;

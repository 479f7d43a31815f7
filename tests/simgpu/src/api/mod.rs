//! The driver's functions, by their exported names. `cuda.h` describes them; comments here say what it does not.
//!
//! What is not here is refused with `CUDA_ERROR_NOT_SUPPORTED`: texture references,
//! views of textures, managed memory, IPC, external memory, green contexts, multicast. A function added to a file
//! of this folder is exported by that alone.
//!
//! Safety: every function here is called through its exported symbol, and its pointers are what the C caller passed.
//! They are used as `cuda.h` says that they may be, and tested for null where that is allowed; there is nothing more
//! to say at each place where one is written through.

#![allow(clippy::undocumented_unsafe_blocks, reason = "said once, at the module's head")]
#![allow(non_snake_case, unreachable_pub, clippy::too_many_arguments, reason = "the names and signatures are cuda.h's")]

mod array;
mod batch;
mod boxes;
mod context;
mod copy;
mod device;
mod event;
mod fill;
mod function;
mod ipc;
mod launch;
mod legacy;
mod library;
mod linker;
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
pub use context::*;
pub use copy::*;
pub use device::*;
pub use event::*;
pub use fill::*;
pub use function::*;
pub use ipc::*;
pub use launch::*;
pub use legacy::*;
pub use library::*;
pub use linker::*;
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

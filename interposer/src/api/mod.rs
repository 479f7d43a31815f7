//! The driver functions that are answered here or decide by hand what travels. Each has its symbol's name and the
//! signature of its line in `driver.table`; generated code exports them, and those that the table alone describes.

#![allow(clippy::missing_safety_doc, reason = "the contract of each function is its documentation in cuda.h")]
#![allow(clippy::too_many_arguments, reason = "the signatures are those of cuda.h")]

mod array;
mod atomics;
mod batch;
mod boxes;
mod callback;
mod context;
mod coredump;
mod decompress;
mod device;
mod event;
mod green;
mod ipc;
mod jit;
mod kernels;
mod launch;
mod legacy;
mod library;
mod linker;
mod logs;
mod lookup;
mod managed;
mod memory;
mod memset;
mod mipmap;
mod moment;
mod occupancy;
mod peers;
mod pinned;
mod pointer;
mod pool_sharing;
mod pools;
mod primary;
mod private;
mod register;
mod stream;
mod stream_attribute;
mod stream_memory;
mod tensor_map;
mod texture;
mod transfer;
mod vmm;

pub(crate) use array::*;
pub(crate) use atomics::*;
pub(crate) use batch::*;
pub(crate) use boxes::*;
pub(crate) use callback::*;
pub(crate) use context::*;
pub(crate) use coredump::*;
pub(crate) use decompress::*;
pub(crate) use device::*;
pub(crate) use event::*;
pub(crate) use green::*;
pub(crate) use ipc::*;
pub(crate) use kernels::*;
pub(crate) use launch::*;
pub(crate) use legacy::*;
pub(crate) use library::*;
pub(crate) use linker::*;
pub(crate) use logs::*;
pub(crate) use lookup::*;
pub(crate) use managed::*;
pub(crate) use memory::*;
pub(crate) use memset::*;
pub(crate) use mipmap::*;
pub(crate) use occupancy::*;
pub(crate) use peers::*;
pub(crate) use pinned::*;
pub(crate) use pointer::*;
pub(crate) use pool_sharing::*;
pub(crate) use pools::*;
pub(crate) use primary::*;
pub(crate) use register::*;
pub(crate) use stream::*;
pub(crate) use stream_attribute::*;
pub(crate) use stream_memory::*;
pub(crate) use tensor_map::*;
pub(crate) use texture::*;
pub(crate) use transfer::*;
pub(crate) use vmm::*;

// Graphs and captures, which this process keeps.
pub(crate) use rekindle_graphs::api::*;

use rekindle_cuda_abi::raw::{put, put_if};
use rekindle_cuda_abi::types::{check, code};

//! The driver's functions around graphs and captures, by their exported names. `cuda.h` describes them; comments here
//! say what it does not.
//!
//! Their parameters carry what the C caller promises of its pointers ([`rekindle_cuda_abi::arguments`]), so they are safe
//! functions.

#![allow(missing_docs, reason = "the functions are cuda.h's, and documented there")]

mod call;
mod captures;
mod execs;
mod graphs;
mod nodes;
mod params;
mod resources;

pub use captures::*;
pub use execs::*;
pub use graphs::*;
pub use nodes::*;
pub use resources::*;

//! The driver's functions around graphs and captures, by their exported names. `cuda.h` describes them; comments here
//! say what it does not.
//!
//! Their parameters carry what the C caller promises of its pointers ([`rekindle_cuda_abi::arguments`]), so they are safe
//! functions.

#![allow(missing_docs, reason = "the functions are cuda.h's, and documented there")]

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

use rekindle_cuda_abi::arguments::{Count, InArray};
use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::driver::driver;
use crate::graph::Edge;

/// Runs a function's work where calls may be made, and turns its result into what C gets.
fn call(work: impl FnOnce() -> Result<()>) -> CUresult {
    let ready = driver().and_then(|driver| driver.current()).map(drop);
    code(ready.and_then(|()| work()))
}

/// Nodes, and what is known of the edges from them, if anything.
fn edges(nodes: InArray<CUgraphNode>, data: InArray<CUgraphEdgeData>, count: Count) -> Result<Vec<Edge>> {
    let nodes = nodes.values(count)?;
    if data.is_null() {
        return Ok(nodes.into_iter().map(|node| (node, CUgraphEdgeData::default())).collect());
    }
    Ok(nodes.into_iter().zip(data.values(count)?).collect())
}

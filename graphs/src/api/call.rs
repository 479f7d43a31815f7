//! The common parts of the functions in this module: the check before their work, and their parameters about edges.

use rekindle_cuda_abi::arguments::{Count, InArray};
use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::driver::driver;
use crate::graph::Edge;

/// Runs a function's work where calls may be made, and turns its result into what C gets.
pub(super) fn call(work: impl FnOnce() -> Result<()>) -> CUresult {
    let ready = driver().and_then(|driver| driver.current()).map(drop);
    code(ready.and_then(|()| work()))
}

/// Nodes, and what is known of the edges from them, if anything.
pub(super) fn edges(nodes: InArray<CUgraphNode>, data: InArray<CUgraphEdgeData>, count: Count) -> Result<Vec<Edge>> {
    let nodes = nodes.values(count)?;
    if data.is_null() {
        return Ok(nodes.into_iter().map(|node| (node, CUgraphEdgeData::default())).collect());
    }
    Ok(nodes.into_iter().zip(data.values(count)?).collect())
}

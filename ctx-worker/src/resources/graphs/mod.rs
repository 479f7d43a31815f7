//! Executable graphs. The client keeps graphs. The worker has a program for each executable graph, and the driver's graph
//! that is made from the program.
//!
//! ```text
//!   GRAPH_CREATE ──> program ──> driver's graph ──> driver's executable graph <── GRAPH_LAUNCH
//!   GRAPH_SET ────> a step of the program, and of the driver's executable graph
//!   a restore ────> program; the rest once the client's pinned memory is there
//! ```
//!
//! A stream takes about a thousand launches of graphs without blocking, however many steps each graph has (measured with a
//! thousand steps). So a launch counts as one command there.

mod bodies;
mod commands;
mod conditions;

use std::collections::{BTreeMap, BTreeSet};

use rekindle_cuda_abi::types::*;
use rekindle_images::BlobKind;
use rekindle_wire::codec::{Malformed, Reader};
use rekindle_wire::command::Launch;
use rekindle_wire::graph::{Program, Step, Task};

use crate::gpu::driver::Driver;
use crate::resources::not_loaded::NotLoaded;
use crate::resources::saved::{Part, Saved};
use crate::session::state::{self, StateError};

/// An executable graph of the client's.
pub(crate) struct Graph {
    /// The context that was current when the graph was made.
    context: u64,
    flags: u64,
    program: Program,
    /// The functions that the graph launches.
    functions: BTreeSet<u64>,
    made: Option<Made>,
}

/// The driver's objects of an executable graph.
#[derive(Clone, Debug)]
struct Made {
    exec: CUgraphExec,
    graph: CUgraph,
    /// The driver's node of each step.
    nodes: Vec<CUgraphNode>,
}

/// All executable graphs, by the client's handle.
pub(crate) type Graphs = BTreeMap<u64, Graph>;

impl Graph {
    /// The graph's program.
    pub(crate) fn program(&self) -> &Program {
        &self.program
    }

    /// The functions that the graph launches, each once.
    pub(crate) fn functions(&self) -> impl Iterator<Item = u64> {
        self.functions.iter().copied()
    }

    /// The same for each step, with the context that it runs in. That takes long for a graph of many.
    pub(crate) fn launches(&self) -> impl Iterator<Item = (u64, u64)> {
        self.program.steps.iter().filter_map(|step| Some((step.context, function(step)?)))
    }

    fn new(context: u64, flags: u64, program: Program) -> Self {
        let functions = functions(&program);
        Self { context, flags, program, functions, made: None }
    }
}

/// The function that a step launches.
fn function(step: &Step) -> Option<u64> {
    match &step.task {
        Task::Kernel(launch) => Launch::read(&mut Reader::new(launch)).ok().map(|l| l.function),
        _ => None,
    }
}

fn functions(program: &Program) -> BTreeSet<u64> {
    program.steps.iter().filter_map(function).collect()
}

/// Makes the driver destroy a graph that does not run.
pub(crate) fn destroy_graph(driver: &Driver, exec: CUgraphExec, graph: CUgraph) {
    // SAFETY: both handles are the driver's own, and not used again.
    unsafe {
        (driver.cuGraphExecDestroy)(exec);
        (driver.cuGraphDestroy)(graph);
    }
}

/// All programs, in one part.
impl Saved for Graphs {
    const KIND: BlobKind = BlobKind::Graphs;
    type With<'a> = ();

    fn save(&self) -> Result<Vec<Part>, StateError> {
        if self.is_empty() {
            return Ok(Vec::new());
        }
        let graph = |(&handle, graph): (&u64, &Graph)| state::Graph {
            handle,
            context: graph.context,
            flags: graph.flags,
            program: graph.program.to_bytes(),
            ..state::Graph::default()
        };
        let graphs = self.iter().map(graph).collect();
        let bytes = state::bytes(&state::Graphs { graphs, ..state::Graphs::default() })?;
        Ok(vec![Part { handle: 0, bytes }])
    }

    fn load(&mut self, part: Part, (): ()) -> Result<(), NotLoaded> {
        read(&part.bytes, self).map_err(|why| NotLoaded::Part { part: "graphs", why })
    }
}

fn read(bytes: &[u8], graphs: &mut Graphs) -> Result<(), Malformed> {
    let saved: state::Graphs = state::parse(bytes)?;
    for it in saved.graphs {
        let graph = Graph::new(it.context, it.flags, Program::from_bytes(&it.program)?);
        graphs.insert(it.handle, graph);
    }
    Ok(())
}

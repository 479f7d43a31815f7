//! Bodies of conditional nodes, which the driver makes with the nodes.

use std::collections::BTreeMap;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Malformed;
use rekindle_wire::graph::{Conditional, Step};

use crate::session::call::Call;
use crate::session::outcome::{Refused, check};

/// `CU_GRAPH_NODE_TYPE_CONDITIONAL`.
const CONDITIONAL: u32 = 13;

/// The driver's graphs of a graph that is being made: its own, and the bodies.
pub(super) struct Bodies {
    graph: CUgraph,
    /// By the place of the conditional step, and the body's number.
    bodies: BTreeMap<(u32, u32), CUgraph>,
}

impl Bodies {
    /// Of a graph without conditional nodes yet.
    pub(super) fn new(graph: CUgraph) -> Self {
        Self { graph, bodies: BTreeMap::new() }
    }

    /// The graph that a step is in.
    pub(super) fn of(&self, step: &Step) -> Result<CUgraph, Malformed> {
        match step.within {
            None => Ok(self.graph),
            Some(body) => {
                self.bodies.get(&body).copied().ok_or(Malformed("a step of a graph in a body that there is not"))
            }
        }
    }

    /// Adds the node of the conditional step at a place, which runs in a context of the client's.
    pub(super) fn add(
        &mut self,
        call: &mut Call,
        graph: CUgraph,
        (place, context): (usize, u64),
        it: &Conditional,
    ) -> Result<CUgraphNode, Refused> {
        let context = super::conditions::context(call, context)?;
        let (node, bodies) = add_node(call, graph, it, context)?;
        for (number, body) in (0..).zip(bodies) {
            self.bodies.insert((place as u32, number), body);
        }
        Ok(node)
    }
}

/// Adds a conditional node to a graph of the driver's: the node, and its bodies.
pub(super) fn add_node(
    call: &Call,
    graph: CUgraph,
    it: &Conditional,
    context: CUcontext,
) -> Result<(CUgraphNode, Vec<CUgraph>), Refused> {
    let params = CudaConditionalNodeParams {
        handle: it.handle,
        kind: it.kind,
        size: it.bodies,
        bodies: std::ptr::null(),
        context,
    };
    let mut node_params = CUgraphNodeParams { kind: CONDITIONAL, reserved: [0; 3], words: [0; 29], reserved_at_end: 0 };
    let mut node = 0;
    // SAFETY: the parameters of a conditional node are the first words of the parameters of any, which are longer; the out
    // parameters are locals, and the driver lists as many bodies as it was asked for.
    unsafe {
        let place = (&raw mut node_params.words).cast::<CudaConditionalNodeParams>();
        place.write(params);
        let (none, no_data) = (std::ptr::null(), std::ptr::null());
        check((call.driver().cuGraphAddNode_v2)(&raw mut node, graph, none, no_data, 0, &raw mut node_params))?;
        let list = place.read().bodies;
        if list.is_null() {
            return Err(Refused::Code(CUDA_ERROR_UNKNOWN));
        }
        Ok((node, std::slice::from_raw_parts(list, it.bodies as usize).to_vec()))
    }
}

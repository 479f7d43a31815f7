//! Conditions: values of a graph that kernels of the graph set, and that its conditional nodes look at.
//!
//! The handle of a condition is its number in the graph: 1 for the first that a program makes, in the graph or in one that is part
//! of it (driver 580 was seen to count so, in every process and on every device). So a program may keep a handle wherever it likes,
//! also in device memory: a graph that is made again, with the same conditions in the same order, has the same handles.

use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::condition::{Condition, place};
use crate::graph::{Edge, Graph, Owner};
use crate::graphs::Graphs;
use crate::task::{Conditional, Task};

/// The types of conditional nodes, `CU_GRAPH_COND_TYPE_*`.
const IF: u32 = 0;
const WHILE: u32 = 1;
const SWITCH: u32 = 2;
/// The most bodies of a node. No device has room for more.
const MOST_BODIES: u32 = 1 << 16;

/// `CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED` and `..._CONDITIONAL_HANDLE_UNUSED`.
const OPERATION_NOT_SUPPORTED: u32 = 3;
const HANDLE_UNUSED: u32 = 5;

impl Graphs {
    /// The graph that a graph is part of, itself if it is part of none.
    pub(crate) fn root(&self, graph: CUgraph) -> Result<CUgraph> {
        let mut root = graph;
        while let Owner::Node(node) | Owner::Body(node) = self.graph(root)?.owner {
            root = self.graph_of(node)?;
        }
        Ok(root)
    }

    /// A new condition of a graph: its handle.
    pub(crate) fn add_condition(
        &mut self,
        graph: CUgraph,
        context: CUcontext,
        default: u32,
        assigns: bool,
    ) -> Result<u64> {
        let root = self.root(graph)?;
        let root = self.graph_mut(root)?;
        root.conditions.push(Condition { context, default, assigns, node: None });
        root.values.add();
        Ok(root.conditions.len() as u64)
    }

    fn condition_mut(&mut self, graph: CUgraph, handle: u64) -> Result<&mut Condition> {
        let root = self.root(graph)?;
        let found = place(handle).and_then(|place| self.graph_mut(root).ok()?.conditions.get_mut(place));
        found.ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// Adds a conditional node; returns it, and where its bodies are listed as long as it lives.
    pub(crate) fn add_conditional(
        &mut self,
        graph: CUgraph,
        after: &[Edge],
        wanted: &CudaConditionalNodeParams,
    ) -> Result<(CUgraphNode, *const CUgraph)> {
        let CudaConditionalNodeParams { handle, kind, size, context, .. } = *wanted;
        let bodies = match kind {
            IF => 1..=2,
            WHILE => 1..=1,
            SWITCH => 1..=MOST_BODIES,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        ensure(bodies.contains(&size), CUDA_ERROR_INVALID_VALUE)?;
        let condition = *self.condition_mut(graph, handle)?;
        ensure(condition.node.is_none() && condition.context == context, CUDA_ERROR_INVALID_VALUE)?;
        self.check_dependencies(graph, after, None)?;
        let bodies: Vec<CUgraph> = (0..size).map(|_| self.create(Owner::Program)).collect();
        let Condition { default, assigns, .. } = condition;
        let task = Conditional { handle, kind, context, default, assigns, bodies: bodies.clone() };
        let node = self.add_node(graph, after, Task::Conditional(task));
        let node = node.inspect_err(|_| bodies.iter().for_each(|body| self.destroy(*body)))?;
        for body in bodies {
            self.graph_mut(body)?.owner = Owner::Body(node);
        }
        self.condition_mut(graph, handle)?.node = Some(node);
        match &self.node(node)?.task {
            Task::Conditional(made) => Ok((node, made.bodies.as_ptr())),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// A task leaves a graph: the conditions of its conditional nodes may have others.
    pub(crate) fn release_conditions(&mut self, graph: CUgraph, task: &Task) {
        let below = match task {
            Task::Conditional(it) => {
                if let Ok(condition) = self.condition_mut(graph, it.handle) {
                    condition.node = None;
                }
                it.bodies.clone()
            }
            Task::Child(child) => vec![*child],
            _ => return,
        };
        for part in below {
            let tasks = self.graph(part).map(|it| it.nodes.values().map(|node| node.task.clone()).collect());
            tasks.unwrap_or_else(|_| Vec::new()).iter().for_each(|task| self.release_conditions(graph, task));
        }
    }

    /// Why a graph cannot be launched for what it has of conditions: `CUDA_GRAPH_INSTANTIATE_*`, and the node.
    pub(crate) fn conditions_problem(&self, graph: CUgraph) -> Option<(u32, CUgraphNode)> {
        let graph = self.graph(graph).ok()?;
        if graph.conditions.iter().any(|condition| condition.node.is_none()) {
            return Some((HANDLE_UNUSED, 0));
        }
        let bad = self.in_bodies(graph, false)?;
        Some((OPERATION_NOT_SUPPORTED, bad))
    }

    /// The first node in a body that may be in none.
    fn in_bodies(&self, graph: &Graph, within: bool) -> Option<CUgraphNode> {
        graph.nodes.iter().find_map(|(handle, node)| {
            let below =
                |graphs: &[CUgraph], within| graphs.iter().find_map(|it| self.in_bodies(self.graph(*it).ok()?, within));
            match &node.task {
                Task::Conditional(it) => below(&it.bodies, true),
                Task::Child(child) => below(&[*child], within),
                Task::Kernel(_) | Task::Copy(_) | Task::Fill(_) | Task::Empty => None,
                _ => within.then_some(*handle),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Host;

    fn params(handle: u64, kind: u32, size: u32) -> CudaConditionalNodeParams {
        CudaConditionalNodeParams { handle, kind, size, bodies: std::ptr::null(), context: 7 }
    }

    fn bodies(graphs: &Graphs, node: CUgraphNode) -> Vec<CUgraph> {
        match &graphs.node(node).unwrap().task {
            Task::Conditional(it) => it.bodies.clone(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn conditions_are_numbered_in_their_graph_with_its_bodies() {
        let mut graphs = Graphs::default();
        let graph = graphs.create(Owner::Program);
        let other = graphs.create(Owner::Program);
        assert_eq!(graphs.add_condition(other, 7, 0, false), Ok(1));
        assert_eq!(graphs.add_condition(graph, 7, 0, false), Ok(1));
        assert_eq!(graphs.add_condition(graph, 7, 3, true), Ok(2));
        let (node, listed) = graphs.add_conditional(graph, &[], &params(1, IF, 2)).unwrap();
        let [first, second] = bodies(&graphs, node)[..] else { panic!("two bodies") };
        // SAFETY: the node lists them as long as it lives.
        assert_eq!(unsafe { listed.read() }, first);
        assert_eq!(graphs.add_condition(first, 7, 0, false), Ok(3));
        assert_eq!(graphs.add_condition(graph, 7, 0, false), Ok(4));
        let (inner, _) = graphs.add_conditional(second, &[], &params(2, WHILE, 1)).unwrap();
        let Task::Conditional(task) = &graphs.node(inner).unwrap().task else { panic!("conditional") };
        assert_eq!((task.default, task.assigns), (3, true));
        assert_eq!(graphs.root(bodies(&graphs, inner)[0]), Ok(graph));
        assert!(graphs.graph(first).unwrap().is_conditional() && graphs.graph(graph).unwrap().is_conditional());
    }

    #[test]
    fn a_node_wants_a_condition_of_its_own_and_as_many_bodies_as_its_type_has() {
        let mut graphs = Graphs::default();
        let graph = graphs.create(Owner::Program);
        graphs.add_condition(graph, 7, 0, false).unwrap();
        let bad = [(0, IF, 1), (2, IF, 1), (1, 3, 1), (1, IF, 0), (1, IF, 3), (1, WHILE, 2), (1, SWITCH, 0)];
        for (handle, kind, size) in bad {
            let added = graphs.add_conditional(graph, &[], &params(handle, kind, size));
            assert_eq!(added.err(), Some(CUDA_ERROR_INVALID_VALUE), "{handle} {kind} {size}");
        }
        let elsewhere = CudaConditionalNodeParams { context: 8, ..params(1, IF, 1) };
        assert!(graphs.add_conditional(graph, &[], &elsewhere).is_err());
        assert_eq!(graphs.conditions_problem(graph), Some((HANDLE_UNUSED, 0)));
        let (node, _) = graphs.add_conditional(graph, &[], &params(1, IF, 1)).unwrap();
        assert!(graphs.add_conditional(graph, &[], &params(1, IF, 1)).is_err());
        assert_eq!(graphs.conditions_problem(graph), None);
        let body = bodies(&graphs, node)[0];
        let host = graphs.add_node(body, &[], Task::Host(Host { function: 1, data: 0 })).unwrap();
        assert_eq!(graphs.conditions_problem(graph), Some((OPERATION_NOT_SUPPORTED, host)));
        // The condition outlives its node, and the bodies do not.
        graphs.remove_node(node).unwrap();
        assert!(graphs.graph(body).is_err());
        assert!(graphs.add_conditional(graph, &[], &params(1, SWITCH, 5)).is_ok());
    }

    #[test]
    fn values_are_of_conditions_that_there_are() {
        let mut graphs = Graphs::default();
        let graph = graphs.create(Owner::Program);
        let handle = graphs.add_condition(graph, 7, 0, false).unwrap();
        let values = graphs.graph(graph).unwrap().values.clone();
        assert!(values.set(handle, 5) && !values.set(handle + 1, 5) && !values.set(0, 5));
        assert_eq!((values.get(handle), values.get(0), values.get(9)), (5, 0, 0));
    }
}

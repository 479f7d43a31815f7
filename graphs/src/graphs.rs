//! All graphs of a process, with the memory and the user objects that they hold.

use std::collections::{HashMap, HashSet};

use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::graph::{Edge, Graph, Node, Owner, PORT_LAUNCH_ORDER, PORT_PROGRAMMATIC, PROGRAMMATIC};
use crate::handles::{GRAPH, Handles, NODE};
use crate::memory::GraphMemory;
use crate::task::Task;
use crate::user::UserObjects;

/// All graphs, and what is theirs.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    handles: Handles<GRAPH>,
    node_handles: Handles<NODE>,
    list: HashMap<CUgraph, Graph>,
    /// The graph of each node.
    nodes: HashMap<CUgraphNode, CUgraph>,
    pub(crate) memory: GraphMemory,
    pub(crate) users: UserObjects,
}

impl Graphs {
    /// A new, empty graph.
    pub(crate) fn create(&mut self, owner: Owner) -> CUgraph {
        let handle = self.handles.fresh();
        self.list.insert(handle, Graph::new(owner));
        handle
    }

    /// Whether there is none.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The graph that a handle names.
    pub(crate) fn graph(&self, graph: CUgraph) -> Result<&Graph> {
        self.list.get(&graph).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// The same, to be changed.
    pub(crate) fn graph_mut(&mut self, graph: CUgraph) -> Result<&mut Graph> {
        self.list.get_mut(&graph).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// The node that a handle names.
    pub(crate) fn node(&self, node: CUgraphNode) -> Result<&Node> {
        let graph = self.graph_of(node)?;
        self.graph(graph)?.nodes.get(&node).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// The same, to be changed.
    pub(crate) fn node_mut(&mut self, node: CUgraphNode) -> Result<&mut Node> {
        let graph = self.graph_of(node)?;
        self.graph_mut(graph)?.nodes.get_mut(&node).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// The graph that a node is in.
    pub(crate) fn graph_of(&self, node: CUgraphNode) -> Result<CUgraph> {
        self.nodes.get(&node).copied().ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// Whether an edge may be between two nodes of a graph.
    fn check_edge(&self, graph: CUgraph, from: Edge, to: Option<&Task>) -> Result<()> {
        let graph = self.graph(graph)?;
        let upstream = graph.nodes.get(&from.0).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let data = from.1;
        let plain = data == CUgraphEdgeData::default();
        let kernels = matches!((&upstream.task, to), (Task::Kernel(_), Some(Task::Kernel(_)) | None));
        let good = data.to_port == 0
            && data.reserved == [0; 5]
            && match data.kind {
                0 => data.from_port == 0 || (kernels && data.from_port <= PORT_LAUNCH_ORDER),
                PROGRAMMATIC => kernels && (PORT_PROGRAMMATIC..=PORT_LAUNCH_ORDER).contains(&data.from_port),
                _ => false,
            };
        if plain || good { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    }

    /// Whether nodes can be what a new one comes after.
    pub(crate) fn check_dependencies(&self, graph: CUgraph, after: &[Edge], task: Option<&Task>) -> Result<()> {
        let mut seen = HashSet::new();
        if !after.iter().all(|e| seen.insert(e.0)) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        after.iter().try_for_each(|e| self.check_edge(graph, *e, task))
    }

    /// Adds a node.
    pub(crate) fn add_node(&mut self, graph: CUgraph, after: &[Edge], task: Task) -> Result<CUgraphNode> {
        self.check_dependencies(graph, after, Some(&task))?;
        let handle = self.node_handles.fresh();
        let place = self.graph_mut(graph)?;
        for (before, _) in after {
            if let Some(node) = place.nodes.get_mut(before) {
                node.before.push(handle);
            }
        }
        place.nodes.insert(handle, Node { task, after: after.to_vec(), before: Vec::new(), origin: 0 });
        self.nodes.insert(handle, graph);
        Ok(handle)
    }

    /// Adds a node that owns a copy of a graph.
    pub(crate) fn add_child(&mut self, graph: CUgraph, after: &[Edge], child: CUgraph) -> Result<CUgraphNode> {
        if self.graph(child)?.has_memory() || self.graph(child)?.is_conditional() {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        if graph == child {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.check_dependencies(graph, after, None)?;
        let copy = self.copy(child, Owner::Program)?;
        let node = self.add_node(graph, after, Task::Child(copy))?;
        self.graph_mut(copy)?.owner = Owner::Node(node);
        Ok(node)
    }

    /// A copy of a graph with all of its children, and user objects.
    pub(crate) fn copy(&mut self, graph: CUgraph, owner: Owner) -> Result<CUgraph> {
        let source = self.graph(graph)?.clone();
        let copy = self.create(owner);
        let mut names = HashMap::new();
        for (handle, node) in &source.nodes {
            let fresh = self.node_handles.fresh();
            names.insert(*handle, fresh);
            let task = match &node.task {
                Task::Conditional(_) => return Err(CUDA_ERROR_NOT_SUPPORTED),
                Task::Child(child) => Task::Child(self.copy(*child, Owner::Node(fresh))?),
                Task::Kernel(kernel) => Task::Kernel(crate::Kernel { pointers: Vec::new(), ..kernel.clone() }),
                other => other.clone(),
            };
            let node = Node { task, after: Vec::new(), before: Vec::new(), origin: *handle };
            self.nodes.insert(fresh, copy);
            self.graph_mut(copy)?.nodes.insert(fresh, node);
        }
        let name = |handle: &CUgraphNode| names.get(handle).copied().unwrap_or(0);
        for (handle, node) in &source.nodes {
            if let Some(place) = self.graph_mut(copy)?.nodes.get_mut(&name(handle)) {
                place.after = node.after.iter().map(|(from, data)| (name(from), *data)).collect();
                place.before = node.before.iter().map(name).collect();
            }
        }
        for (user, count) in source.users {
            self.retain_user(copy, user, count)?;
        }
        Ok(copy)
    }

    /// Ends a graph and all in it.
    pub(crate) fn destroy(&mut self, graph: CUgraph) {
        let Some(gone) = self.list.remove(&graph) else { return };
        for (handle, node) in gone.nodes {
            self.nodes.remove(&handle);
            self.drop_task(&node.task);
        }
        for (user, count) in gone.users {
            let _ = self.users.release(user, count);
        }
    }

    fn drop_task(&mut self, task: &Task) {
        match task {
            Task::Child(child) => self.destroy(*child),
            Task::Conditional(it) => it.bodies.iter().for_each(|body| self.destroy(*body)),
            Task::Allocate(memory) => self.memory.release(memory.address),
            _ => {}
        }
    }

    /// Takes a node out of its graph.
    pub(crate) fn remove_node(&mut self, node: CUgraphNode) -> Result<()> {
        let graph = self.graph_of(node)?;
        let place = self.graph_mut(graph)?;
        let gone = place.nodes.remove(&node).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        for (before, _) in &gone.after {
            if let Some(other) = place.nodes.get_mut(before) {
                other.before.retain(|n| *n != node);
            }
        }
        for after in &gone.before {
            if let Some(other) = place.nodes.get_mut(after) {
                other.after.retain(|e| e.0 != node);
            }
        }
        self.nodes.remove(&node);
        self.release_conditions(graph, &gone.task);
        self.drop_task(&gone.task);
        Ok(())
    }

    /// Adds an edge. Cycles are found when the graph is instantiated.
    pub(crate) fn add_edge(&mut self, graph: CUgraph, from: Edge, to: CUgraphNode) -> Result<()> {
        let task = &self.graph(graph)?.nodes.get(&to).ok_or(CUDA_ERROR_INVALID_VALUE)?.task;
        self.check_edge(graph, from, Some(task))?;
        let place = self.graph_mut(graph)?;
        let there = place.nodes.get(&to).is_some_and(|n| n.after.iter().any(|e| e.0 == from.0));
        if there || from.0 == to {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if let Some(node) = place.nodes.get_mut(&to) {
            node.after.push(from);
        }
        if let Some(node) = place.nodes.get_mut(&from.0) {
            node.before.push(to);
        }
        Ok(())
    }

    /// Takes an edge out; where nothing is said of it, whatever it is.
    pub(crate) fn remove_edge(
        &mut self,
        graph: CUgraph,
        from: (CUgraphNode, Option<CUgraphEdgeData>),
        to: CUgraphNode,
    ) -> Result<()> {
        let place = self.graph_mut(graph)?;
        let node = place.nodes.get_mut(&to).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let at = node
            .after
            .iter()
            .position(|e| e.0 == from.0 && from.1.is_none_or(|data| data == e.1))
            .ok_or(CUDA_ERROR_INVALID_VALUE)?;
        node.after.remove(at);
        if let Some(node) = place.nodes.get_mut(&from.0) {
            node.before.retain(|n| *n != to);
        }
        Ok(())
    }

    /// The node of a clone that stands for a node of the original.
    pub(crate) fn find_in_clone(&self, node: CUgraphNode, clone: CUgraph) -> Result<CUgraphNode> {
        let found = self.graph(clone)?.nodes.iter().find(|(_, n)| n.origin == node).map(|(h, _)| *h);
        found.ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// Gives a graph references of its own.
    pub(crate) fn retain_user(&mut self, graph: CUgraph, user: CUuserObject, count: u32) -> Result<()> {
        self.users.retain(user, count)?;
        let users = &mut self.graph_mut(graph)?.users;
        match users.iter_mut().find(|(u, _)| *u == user) {
            Some((_, n)) => *n += count,
            None => users.push((user, count)),
        }
        Ok(())
    }

    /// Takes references away from a graph, as many as it has at most.
    pub(crate) fn release_user(&mut self, graph: CUgraph, user: CUuserObject, count: u32) -> Result<()> {
        let users = &mut self.graph_mut(graph)?.users;
        let Some(at) = users.iter().position(|(u, _)| *u == user) else { return Ok(()) };
        let count = count.min(users[at].1);
        users[at].1 -= count;
        if users[at].1 == 0 {
            users.remove(at);
        }
        self.users.release(user, count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: CUgraphEdgeData = CUgraphEdgeData { from_port: 0, to_port: 0, kind: 0, reserved: [0; 5] };

    fn diamond(graphs: &mut Graphs) -> (CUgraph, [CUgraphNode; 4]) {
        let g = graphs.create(Owner::Program);
        let a = graphs.add_node(g, &[], Task::Empty).unwrap();
        let b = graphs.add_node(g, &[(a, PLAIN)], Task::Empty).unwrap();
        let c = graphs.add_node(g, &[(a, PLAIN)], Task::Empty).unwrap();
        let d = graphs.add_node(g, &[(b, PLAIN), (c, PLAIN)], Task::Empty).unwrap();
        (g, [a, b, c, d])
    }

    #[test]
    fn edges_are_listed_by_the_order_of_their_nodes() {
        let mut graphs = Graphs::default();
        let (g, [a, b, c, d]) = diamond(&mut graphs);
        let edges: Vec<_> = graphs.graph(g).unwrap().edges().iter().map(|e| (e.0, e.1)).collect();
        assert_eq!(edges, [(a, b), (a, c), (b, d), (c, d)]);
        assert_eq!(graphs.graph(g).unwrap().order(), Some(vec![a, b, c, d]));
    }

    #[test]
    fn a_cycle_is_allowed_and_has_no_order() {
        let mut graphs = Graphs::default();
        let (g, [a, _, _, d]) = diamond(&mut graphs);
        assert_eq!(graphs.add_edge(g, (a, PLAIN), a), Err(CUDA_ERROR_INVALID_VALUE));
        graphs.add_edge(g, (d, PLAIN), a).unwrap();
        assert_eq!(graphs.graph(g).unwrap().order(), None);
        graphs.remove_edge(g, (d, Some(PLAIN)), a).unwrap();
        assert!(graphs.graph(g).unwrap().order().is_some());
        assert_eq!(graphs.remove_edge(g, (d, None), a), Err(CUDA_ERROR_INVALID_VALUE));
    }

    #[test]
    fn an_edge_twice_and_one_to_another_graph_are_refused() {
        let mut graphs = Graphs::default();
        let (g, [a, b, ..]) = diamond(&mut graphs);
        let (other, _) = diamond(&mut graphs);
        assert_eq!(graphs.add_edge(g, (a, PLAIN), b), Err(CUDA_ERROR_INVALID_VALUE));
        assert_eq!(graphs.add_node(other, &[(a, PLAIN)], Task::Empty), Err(CUDA_ERROR_INVALID_VALUE));
        assert_eq!(graphs.add_node(g, &[(a, PLAIN), (a, PLAIN)], Task::Empty), Err(CUDA_ERROR_INVALID_VALUE));
        let programmatic = CUgraphEdgeData { kind: PROGRAMMATIC, from_port: PORT_PROGRAMMATIC, ..PLAIN };
        assert_eq!(graphs.add_node(g, &[(a, programmatic)], Task::Empty), Err(CUDA_ERROR_INVALID_VALUE));
    }

    #[test]
    fn a_clone_has_its_own_nodes_and_children() {
        let mut graphs = Graphs::default();
        let (g, [a, b, ..]) = diamond(&mut graphs);
        let (inner, _) = diamond(&mut graphs);
        let child = graphs.add_child(g, &[(b, PLAIN)], inner).unwrap();
        let clone = graphs.copy(g, Owner::Program).unwrap();
        let twin = graphs.find_in_clone(child, clone).unwrap();
        let graph_in = |node| match graphs.node(node).unwrap().task {
            Task::Child(graph) => graph,
            _ => panic!("no child"),
        };
        assert!(graph_in(child) != graph_in(twin) && graph_in(child) != inner);
        assert_ne!(graphs.find_in_clone(a, clone).unwrap(), a);
        assert_eq!(graphs.find_in_clone(a, g), Err(CUDA_ERROR_INVALID_VALUE));
        let (count, nodes) = (graphs.list.len(), graphs.nodes.len());
        graphs.destroy(clone);
        assert_eq!((graphs.list.len(), graphs.nodes.len()), (count - 2, nodes - 9));
        assert!(graphs.node(a).is_ok() && graphs.node(twin).is_err());
    }

    #[test]
    fn a_node_that_goes_takes_its_edges_along() {
        let mut graphs = Graphs::default();
        let (g, [a, b, c, d]) = diamond(&mut graphs);
        graphs.remove_node(b).unwrap();
        let edges: Vec<_> = graphs.graph(g).unwrap().edges().iter().map(|e| (e.0, e.1)).collect();
        assert_eq!(edges, [(a, c), (c, d)]);
        assert_eq!(graphs.remove_node(b), Err(CUDA_ERROR_INVALID_VALUE));
    }

    #[test]
    fn the_last_reference_calls_the_destructor() {
        let mut graphs = Graphs::default();
        let user = graphs.users.create(7, 8, 1);
        let graph = graphs.create(Owner::Program);
        graphs.retain_user(graph, user, 2).unwrap();
        graphs.release_user(graph, user, 3).unwrap();
        graphs.release_user(graph, user, 1).unwrap();
        graphs.retain_user(graph, user, 2).unwrap();
        graphs.users.release(user, 1).unwrap();
        let clone = graphs.copy(graph, Owner::Program).unwrap();
        graphs.destroy(graph);
        assert!(graphs.users.take_destructors().is_empty());
        graphs.destroy(clone);
        assert_eq!(graphs.users.take_destructors(), [(8, 7)]);
    }
}

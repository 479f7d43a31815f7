//! Graphs: nodes and what each must come after.

use std::collections::{BTreeMap, HashMap, HashSet};

use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::store::Store;
use crate::task::Task;

/// A node that another comes after, and what of it.
pub(crate) type Edge = (CUgraphNode, CUgraphEdgeData);

/// `CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC`, and the ports of kernel nodes: when all blocks have triggered it or ended,
/// when all have begun.
pub(crate) const PROGRAMMATIC: u8 = 1;
pub(crate) const PORT_PROGRAMMATIC: u8 = 1;
pub(crate) const PORT_LAUNCH_ORDER: u8 = 2;

/// A node.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) task: Task,
    /// What it comes after.
    pub(crate) after: Vec<Edge>,
    /// What comes after it.
    pub(crate) before: Vec<CUgraphNode>,
    /// The node that this is a clone of, or 0.
    pub(crate) origin: CUgraphNode,
}

/// Who destroys a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The application.
    Program,
    /// The node of which it is the child.
    Node(CUgraphNode),
    /// A capture, until it ends.
    Capture,
}

/// A graph. Handles count up, so that nodes are in the order in which they were made.
#[derive(Clone, Debug)]
pub(crate) struct Graph {
    pub(crate) nodes: BTreeMap<CUgraphNode, Node>,
    pub(crate) owner: Owner,
    /// How many captures record into it.
    pub(crate) captures: usize,
    /// References to user objects.
    pub(crate) users: Vec<(CUuserObject, u32)>,
    /// Executable graphs that were made of it and are alive.
    pub(crate) execs: usize,
}

impl Graph {
    fn new(owner: Owner) -> Self {
        Self { nodes: BTreeMap::new(), owner, captures: 0, users: Vec::new(), execs: 0 }
    }

    /// Whether it has nodes that allocate or free memory.
    pub(crate) fn has_memory(&self) -> bool {
        self.nodes.values().any(|n| matches!(n.task, Task::Allocate(_) | Task::Free(_)))
    }

    /// From which node to which, by their order.
    pub(crate) fn edges(&self) -> Vec<(CUgraphNode, CUgraphNode, CUgraphEdgeData)> {
        let of = |from: &CUgraphNode, to: &CUgraphNode| {
            let after = self.nodes.get(to).map_or(&[][..], |n| &n.after);
            after.iter().filter(|e| e.0 == *from).map(|e| (*from, *to, e.1)).collect::<Vec<_>>()
        };
        self.nodes.iter().flat_map(|(from, node)| node.before.iter().flat_map(move |to| of(from, to))).collect()
    }

    /// The nodes, each behind what it comes after; `None` where there is a cycle.
    pub(crate) fn order(&self) -> Option<Vec<CUgraphNode>> {
        let mut waits: HashMap<CUgraphNode, usize> = self.nodes.iter().map(|(h, n)| (*h, n.after.len())).collect();
        let roots = self.nodes.iter().filter(|(_, n)| n.after.is_empty()).map(|(h, _)| *h);
        let mut ready: std::collections::BTreeSet<CUgraphNode> = roots.collect();
        let mut order = Vec::with_capacity(self.nodes.len());
        while let Some(node) = ready.pop_first() {
            order.push(node);
            for next in self.nodes.get(&node).map_or(&[][..], |n| &n.before) {
                let left = waits.get_mut(next)?;
                *left = left.saturating_sub(1);
                if *left == 0 {
                    ready.insert(*next);
                }
            }
        }
        (order.len() == self.nodes.len()).then_some(order)
    }

    /// A node of a cycle, if there is one, or one behind it.
    pub(crate) fn cycle(&self) -> Option<CUgraphNode> {
        if self.order().is_some() {
            return None;
        }
        // What nothing comes before is in none.
        let mut left: HashSet<CUgraphNode> = self.nodes.keys().copied().collect();
        loop {
            let free =
                |h: &CUgraphNode| !self.nodes.get(h).is_some_and(|n| n.after.iter().any(|e| left.contains(&e.0)));
            let out: Vec<CUgraphNode> = left.iter().copied().filter(free).collect();
            if out.is_empty() {
                return left.into_iter().min();
            }
            left.retain(|h| !out.contains(h));
        }
    }

    /// Whether all of these nodes are among what the others come after, or are they.
    pub(crate) fn reaches(&self, from: impl Iterator<Item = CUgraphNode>, all: &[CUgraphNode]) -> bool {
        let mut seen: HashSet<CUgraphNode> = from.collect();
        let mut open: Vec<CUgraphNode> = seen.iter().copied().collect();
        while let Some(node) = open.pop() {
            for (before, _) in self.nodes.get(&node).map_or(&[][..], |n| &n.after) {
                if seen.insert(*before) {
                    open.push(*before);
                }
            }
        }
        all.iter().all(|node| seen.contains(node))
    }
}

impl Store {
    /// A new, empty graph.
    pub(crate) fn create_graph(&mut self, owner: Owner) -> CUgraph {
        let handle = self.fresh_graph();
        self.graphs.insert(handle, Graph::new(owner));
        handle
    }

    /// The node that a handle names.
    pub(crate) fn node(&self, node: CUgraphNode) -> Result<&Node> {
        let graph = self.graph_of(node)?;
        self.graph(graph)?.nodes.get(&node).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

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
        let handle = self.fresh_node();
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
        if self.graph(child)?.has_memory() {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        if graph == child {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.check_dependencies(graph, after, None)?;
        let copy = self.copy_graph(child, Owner::Program)?;
        let node = self.add_node(graph, after, Task::Child(copy))?;
        self.graph_mut(copy)?.owner = Owner::Node(node);
        Ok(node)
    }

    /// A copy of a graph with all of its children, and user objects.
    pub(crate) fn copy_graph(&mut self, graph: CUgraph, owner: Owner) -> Result<CUgraph> {
        let source = self.graph(graph)?.clone();
        let copy = self.create_graph(owner);
        let mut names = HashMap::new();
        for (handle, node) in &source.nodes {
            let fresh = self.fresh_node();
            names.insert(*handle, fresh);
            let task = match &node.task {
                Task::Child(child) => Task::Child(self.copy_graph(*child, Owner::Node(fresh))?),
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
            self.retain_for_graph(copy, user, count)?;
        }
        Ok(copy)
    }

    /// Ends a graph and all in it.
    pub(crate) fn drop_graph(&mut self, graph: CUgraph) {
        let Some(gone) = self.graphs.remove(&graph) else { return };
        for (handle, node) in gone.nodes {
            self.nodes.remove(&handle);
            self.drop_task(&node.task);
        }
        for (user, count) in gone.users {
            let _ = self.release_user(user, count);
        }
    }

    fn drop_task(&mut self, task: &Task) {
        match task {
            Task::Child(child) => self.drop_graph(*child),
            Task::Allocate(memory) => self.leave_memory(memory.address),
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
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: CUgraphEdgeData = CUgraphEdgeData { from_port: 0, to_port: 0, kind: 0, reserved: [0; 5] };

    fn diamond(store: &mut Store) -> (CUgraph, [CUgraphNode; 4]) {
        let g = store.create_graph(Owner::Program);
        let a = store.add_node(g, &[], Task::Empty).unwrap();
        let b = store.add_node(g, &[(a, PLAIN)], Task::Empty).unwrap();
        let c = store.add_node(g, &[(a, PLAIN)], Task::Empty).unwrap();
        let d = store.add_node(g, &[(b, PLAIN), (c, PLAIN)], Task::Empty).unwrap();
        (g, [a, b, c, d])
    }

    #[test]
    fn edges_are_listed_by_the_order_of_their_nodes() {
        let mut store = Store::default();
        let (g, [a, b, c, d]) = diamond(&mut store);
        let edges: Vec<_> = store.graph(g).unwrap().edges().iter().map(|e| (e.0, e.1)).collect();
        assert_eq!(edges, [(a, b), (a, c), (b, d), (c, d)]);
        assert_eq!(store.graph(g).unwrap().order(), Some(vec![a, b, c, d]));
    }

    #[test]
    fn a_cycle_is_allowed_and_has_no_order() {
        let mut store = Store::default();
        let (g, [a, _, _, d]) = diamond(&mut store);
        assert_eq!(store.add_edge(g, (a, PLAIN), a), Err(CUDA_ERROR_INVALID_VALUE));
        store.add_edge(g, (d, PLAIN), a).unwrap();
        assert_eq!(store.graph(g).unwrap().order(), None);
        store.remove_edge(g, (d, Some(PLAIN)), a).unwrap();
        assert!(store.graph(g).unwrap().order().is_some());
        assert_eq!(store.remove_edge(g, (d, None), a), Err(CUDA_ERROR_INVALID_VALUE));
    }

    #[test]
    fn an_edge_twice_and_one_to_another_graph_are_refused() {
        let mut store = Store::default();
        let (g, [a, b, ..]) = diamond(&mut store);
        let (other, _) = diamond(&mut store);
        assert_eq!(store.add_edge(g, (a, PLAIN), b), Err(CUDA_ERROR_INVALID_VALUE));
        assert_eq!(store.add_node(other, &[(a, PLAIN)], Task::Empty), Err(CUDA_ERROR_INVALID_VALUE));
        assert_eq!(store.add_node(g, &[(a, PLAIN), (a, PLAIN)], Task::Empty), Err(CUDA_ERROR_INVALID_VALUE));
        let programmatic = CUgraphEdgeData { kind: PROGRAMMATIC, from_port: PORT_PROGRAMMATIC, ..PLAIN };
        assert_eq!(store.add_node(g, &[(a, programmatic)], Task::Empty), Err(CUDA_ERROR_INVALID_VALUE));
    }

    #[test]
    fn a_clone_has_its_own_nodes_and_children() {
        let mut store = Store::default();
        let (g, [a, b, ..]) = diamond(&mut store);
        let (inner, _) = diamond(&mut store);
        let child = store.add_child(g, &[(b, PLAIN)], inner).unwrap();
        let clone = store.copy_graph(g, Owner::Program).unwrap();
        let twin = store.find_in_clone(child, clone).unwrap();
        let graph_in = |node| match store.node(node).unwrap().task {
            Task::Child(graph) => graph,
            _ => panic!("no child"),
        };
        assert!(graph_in(child) != graph_in(twin) && graph_in(child) != inner);
        assert_ne!(store.find_in_clone(a, clone).unwrap(), a);
        assert_eq!(store.find_in_clone(a, g), Err(CUDA_ERROR_INVALID_VALUE));
        let (graphs, nodes) = (store.graphs.len(), store.nodes.len());
        store.drop_graph(clone);
        assert_eq!((store.graphs.len(), store.nodes.len()), (graphs - 2, nodes - 9));
        assert!(store.node(a).is_ok() && store.node(twin).is_err());
    }

    #[test]
    fn a_node_that_goes_takes_its_edges_along() {
        let mut store = Store::default();
        let (g, [a, b, c, d]) = diamond(&mut store);
        store.remove_node(b).unwrap();
        let edges: Vec<_> = store.graph(g).unwrap().edges().iter().map(|e| (e.0, e.1)).collect();
        assert_eq!(edges, [(a, c), (c, d)]);
        assert_eq!(store.remove_node(b), Err(CUDA_ERROR_INVALID_VALUE));
    }
}

//! A graph: nodes, and the edges between them.

use std::collections::{BTreeMap, HashMap, HashSet};

use rekindle_cuda_abi::types::*;

use crate::condition::{Condition, Values};
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
    /// The nodes that it comes after.
    pub(crate) after: Vec<Edge>,
    /// The nodes that come after it.
    pub(crate) before: Vec<CUgraphNode>,
    /// The node that this is a clone of, or 0.
    pub(crate) origin: CUgraphNode,
}

/// The owner of a graph, which destroys it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The application.
    Program,
    /// The node of which it is the child.
    Node(CUgraphNode),
    /// The conditional node of which it is a body.
    Body(CUgraphNode),
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
    /// Its conditions, by their handles less one. Those of graphs that are part of another one are the other's.
    pub(crate) conditions: Vec<Condition>,
    /// Their values.
    pub(crate) values: Values,
}

impl Graph {
    pub(crate) fn new(owner: Owner) -> Self {
        Self {
            nodes: BTreeMap::new(),
            owner,
            captures: 0,
            users: Vec::new(),
            execs: 0,
            conditions: Vec::new(),
            values: Values::default(),
        }
    }

    /// Whether the application may destroy it, or make it a child.
    pub(crate) fn is_programs(&self) -> bool {
        self.owner == Owner::Program && self.captures == 0
    }

    /// Whether it has conditions, conditional nodes, or is the body of one: there may be no second of it.
    pub(crate) fn is_conditional(&self) -> bool {
        matches!(self.owner, Owner::Body(_))
            || !self.conditions.is_empty()
            || self.nodes.values().any(|node| matches!(node.task, Task::Conditional(_)))
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
        // A node without predecessors is in no cycle.
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

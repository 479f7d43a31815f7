//! A graph as it is launched: steps in an order in which they can be done.

use rekindle_cuda_abi::types::*;

use crate::condition::Values;
use crate::task::Task;

/// A step of a launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The node that it stands for.
    pub node: CUgraphNode,
    /// The work. Children are unfolded: the step of their node does nothing, after all of theirs.
    pub task: Task,
    /// Whether the step does its work. A disabled step does nothing.
    pub enabled: bool,
    /// The places of the steps that it comes after, all before its own, and what of them.
    pub after: Vec<(usize, CUgraphEdgeData)>,
    /// The place of the conditional step of which it is in a body, and in which.
    pub within: Option<(usize, usize)>,
}

/// The steps of a launch, each behind what it comes after. The steps of a conditional step's bodies are behind it.
#[derive(Clone, Debug, Default)]
pub struct Flat {
    /// In an order in which they can be done one after the other.
    pub steps: Vec<Step>,
    /// The values of the graph's conditions.
    pub values: Values,
}

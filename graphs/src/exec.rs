//! Executable graphs: copies of graphs with their children unfolded, which a later change of the graph does not touch.

use std::collections::HashMap;
use std::sync::Arc;

use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::graph::{Edge, Graph, Owner};
use crate::graphs::Graphs;
use crate::handles::{EXEC, Handles};
use crate::steps::{Flat, Step};
use crate::task::Task;

/// The kinds of a graph's nodes and edges, which decide whether another graph can take its place. The last node comes first, so
/// that a node's successors are before it.
#[derive(Clone, Debug)]
struct Shape {
    nodes: Vec<Part>,
}

#[derive(Clone, Debug)]
struct Part {
    node: CUgraphNode,
    task: Task,
    /// The places of the nodes that come after it, and what of it they wait for.
    before: Vec<(usize, CUgraphEdgeData)>,
    /// Of its child, or of its bodies.
    parts: Vec<Shape>,
}

/// An executable graph.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) flags: u64,
    pub(crate) graph: CUgraph,
    shape: Shape,
    pub(crate) flat: Arc<Flat>,
    /// The step of each node.
    places: HashMap<CUgraphNode, usize>,
    /// The driver's name of it.
    pub(crate) made: u64,
    pub(crate) allocates: Vec<CUdeviceptr>,
    pub(crate) frees: Vec<CUdeviceptr>,
    /// References to user objects.
    pub(crate) users: Vec<(CUuserObject, u32)>,
}

/// All executable graphs.
#[derive(Debug, Default)]
pub(crate) struct Execs {
    handles: Handles<EXEC>,
    list: HashMap<CUgraphExec, Exec>,
    /// The driver's names of executable graphs that are no more. The driver is to destroy them.
    destroyed: Vec<u64>,
}

/// `CU_GRAPH_EXEC_UPDATE_*`, and the nodes that it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) result: u32,
    pub(crate) node: CUgraphNode,
    pub(crate) from: CUgraphNode,
}

pub(crate) const TOPOLOGY_CHANGED: u32 = 2;
pub(crate) const TYPE_CHANGED: u32 = 3;
pub(crate) const PARAMETERS_CHANGED: u32 = 5;
pub(crate) const NOT_SUPPORTED: u32 = 6;

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`.
pub(crate) const AUTO_FREE: u64 = 1;

impl Execs {
    /// The executable graph that a handle names.
    pub(crate) fn get_mut(&mut self, exec: CUgraphExec) -> Result<&mut Exec> {
        self.list.get_mut(&exec).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// Takes out the driver's names of executable graphs that are no more.
    pub(crate) fn take_destroyed(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.destroyed)
    }

    /// Takes up an executable graph that the driver has made.
    pub(crate) fn add(&mut self, graphs: &mut Graphs, exec: Exec) -> Result<CUgraphExec> {
        let handle = self.handles.fresh();
        if let Ok(graph) = graphs.graph_mut(exec.graph) {
            graph.execs += 1;
        }
        exec.allocates.iter().for_each(|address| graphs.memory.retain(*address));
        for (user, count) in &exec.users {
            graphs.users.retain(*user, *count)?;
        }
        self.list.insert(handle, exec);
        Ok(handle)
    }

    /// Ends an executable graph.
    pub(crate) fn destroy(&mut self, graphs: &mut Graphs, exec: CUgraphExec) -> Result<()> {
        let gone = self.list.remove(&exec).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if let Ok(graph) = graphs.graph_mut(gone.graph) {
            graph.execs = graph.execs.saturating_sub(1);
        }
        gone.allocates.iter().for_each(|address| graphs.memory.release(*address));
        for (user, count) in gone.users {
            let _ = graphs.users.release(user, count);
        }
        self.destroyed.push(gone.made);
        Ok(())
    }

    /// The steps of an executable graph once it has taken another graph's parameters, and the places of those that differ.
    pub(crate) fn updated(
        &self,
        graphs: &Graphs,
        exec: CUgraphExec,
        graph: CUgraph,
    ) -> Result<std::result::Result<(Flat, Vec<usize>), Refusal>> {
        let old = self.list.get(&exec).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let shape = shape(graphs, graphs.graph(graph)?)?;
        let mut flat = (*old.flat).clone();
        Ok(old.take_over(&old.shape, &shape, &mut flat).map(|()| old.with_changes(flat)))
    }

    /// The same for the child of one node.
    pub(crate) fn updated_child(
        &self,
        graphs: &Graphs,
        exec: CUgraphExec,
        node: CUgraphNode,
        graph: CUgraph,
    ) -> Result<std::result::Result<(Flat, Vec<usize>), Refusal>> {
        let old = self.list.get(&exec).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let own = old.shape.find_child(node).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let shape = shape(graphs, graphs.graph(graph)?)?;
        let mut flat = (*old.flat).clone();
        Ok(old.take_over(own, &shape, &mut flat).map(|()| old.with_changes(flat)))
    }

    /// Gives one node of an executable graph another task, or enables it or not. `tell` hands the change on: the driver's
    /// name of the graph, its steps, and which it is. Where it fails, nothing has changed.
    pub(crate) fn change(
        &mut self,
        exec: CUgraphExec,
        node: CUgraphNode,
        change: impl FnOnce(&mut Step) -> Result<()>,
        tell: impl FnOnce(u64, &Flat, usize) -> Result<()>,
    ) -> Result<()> {
        let exec = self.get_mut(exec)?;
        let place = *exec.places.get(&node).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // Nobody else has the steps, unless a launch is under way in another thread.
        let steps = &mut Arc::make_mut(&mut exec.flat).steps;
        let step = steps.get_mut(place).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let before = step.clone();
        let mut told = change(step);
        if told.is_ok() && *step != before {
            told = tell(exec.made, &exec.flat, place);
        }
        if told.is_err()
            && let Some(step) = Arc::make_mut(&mut exec.flat).steps.get_mut(place)
        {
            *step = before;
        }
        told
    }

    /// The step of a node.
    pub(crate) fn step(&self, exec: CUgraphExec, node: CUgraphNode) -> Result<&Step> {
        let exec = self.list.get(&exec).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        exec.places.get(&node).and_then(|i| exec.flat.steps.get(*i)).ok_or(CUDA_ERROR_INVALID_VALUE)
    }
}

/// The shape of a graph.
fn shape(graphs: &Graphs, graph: &Graph) -> Result<Shape> {
    let mut order = graph.order().ok_or(CUDA_ERROR_INVALID_VALUE)?;
    order.reverse();
    let places: HashMap<CUgraphNode, usize> = order.iter().enumerate().map(|(i, n)| (*n, i)).collect();
    let mut nodes = Vec::with_capacity(order.len());
    for handle in order {
        let node = graph.nodes.get(&handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let parts = match &node.task {
            Task::Child(child) => vec![shape(graphs, graphs.graph(*child)?)?],
            Task::Conditional(it) => {
                it.bodies.iter().map(|body| shape(graphs, graphs.graph(*body)?)).collect::<Result<_>>()?
            }
            _ => Vec::new(),
        };
        let mut before = Vec::with_capacity(node.before.len());
        for next in &node.before {
            let edges = graph.nodes.get(next).map_or(&[][..], |n| &n.after);
            let data = edges.iter().find(|e: &&Edge| e.0 == handle).map_or_else(Default::default, |e| e.1);
            before.extend(places.get(next).map(|place| (*place, data)));
        }
        before.sort_by_key(|edge| edge.0);
        nodes.push(Part { node: handle, task: node.task.clone(), before, parts });
    }
    Ok(Shape { nodes })
}

/// Unfolds a graph behind steps that are there; returns the steps that nothing in it comes after.
fn unfold(
    graphs: &Graphs,
    graph: &Graph,
    behind: &[(usize, CUgraphEdgeData)],
    within: Option<(usize, usize)>,
    flat: &mut Flat,
) -> Result<Vec<usize>> {
    let order = graph.order().ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let mut places = HashMap::new();
    for handle in order {
        let node = graph.nodes.get(&handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let mut after: Vec<_> = node.after.iter().filter_map(|e| places.get(&e.0).map(|i| (*i, e.1))).collect();
        if after.is_empty() {
            after = behind.to_vec();
        }
        if let Task::Child(child) = node.task {
            let ends = unfold(graphs, graphs.graph(child)?, &after, within, flat)?;
            if !ends.is_empty() {
                after = ends.into_iter().map(|i| (i, CUgraphEdgeData::default())).collect();
            }
        }
        let place = flat.steps.len();
        places.insert(handle, place);
        flat.steps.push(Step { node: handle, task: node.task.clone(), enabled: true, after, within });
        if let Task::Conditional(it) = &node.task {
            for (number, body) in it.bodies.iter().enumerate() {
                unfold(graphs, graphs.graph(*body)?, &[], Some((place, number)), flat)?;
            }
        }
    }
    let ends = graph.nodes.iter().filter(|(_, n)| n.before.is_empty()).filter_map(|(h, _)| places.get(h).copied());
    Ok(ends.collect())
}

impl Exec {
    /// An executable graph, of which the driver has not been told.
    pub(crate) fn prepare(graphs: &Graphs, graph: CUgraph, flags: u64) -> Result<Self> {
        let source = graphs.graph(graph)?;
        // Memory of a graph has one address: it must not be there twice.
        if source.has_memory() && source.execs > 0 {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        // A condition has one value, which two executable graphs would share; and a body is launched with its node.
        if source.is_conditional() && (source.execs > 0 || matches!(source.owner, Owner::Body(_))) {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        ensure(graphs.conditions_problem(graph).is_none(), CUDA_ERROR_INVALID_VALUE)?;
        let mut flat = Flat { steps: Vec::new(), values: source.values.clone() };
        unfold(graphs, source, &[], None, &mut flat)?;
        let places = flat.steps.iter().enumerate().map(|(i, step)| (step.node, i)).collect();
        let tasks = || flat.steps.iter().map(|s| &s.task);
        let allocates =
            tasks().filter_map(|t| if let Task::Allocate(m) = t { Some(m.address) } else { None }).collect();
        let frees = tasks().filter_map(|t| if let Task::Free(address) = t { Some(*address) } else { None }).collect();
        let (shape, users) = (shape(graphs, source)?, source.users.clone());
        Ok(Self { flags, graph, shape, places, made: 0, allocates, frees, users, flat: Arc::new(flat) })
    }

    fn with_changes(&self, flat: Flat) -> (Flat, Vec<usize>) {
        let pairs = self.flat.steps.iter().zip(&flat.steps).enumerate();
        let changed = pairs.filter(|(_, (old, new))| old != new).map(|(i, _)| i).collect();
        (flat, changed)
    }

    /// Gives the steps of `own`'s nodes the tasks of `other`'s.
    fn take_over(&self, own: &Shape, other: &Shape, flat: &mut Flat) -> std::result::Result<(), Refusal> {
        let refuse = |result, node, from| Err(Refusal { result, node, from });
        if own.nodes.len() != other.nodes.len() {
            return refuse(TOPOLOGY_CHANGED, 0, 0);
        }
        for (part, new) in own.nodes.iter().zip(&other.nodes) {
            if part.task.kind() != new.task.kind() {
                return refuse(TYPE_CHANGED, new.node, 0);
            }
            if part.before != new.before {
                return refuse(TOPOLOGY_CHANGED, new.node, 0);
            }
            let mut task = new.task.clone();
            if let (Task::Conditional(a), Task::Conditional(b)) = (&part.task, &mut task) {
                if (a.handle, a.kind, a.context, a.bodies.len()) != (b.handle, b.kind, b.context, b.bodies.len()) {
                    return refuse(NOT_SUPPORTED, new.node, 0);
                }
                // A step's bodies are its own ones, whatever graph it takes its parameters from.
                b.bodies.clone_from(&a.bodies);
            }
            for (own, other) in part.parts.iter().zip(&new.parts) {
                self.take_over(own, other, flat)?;
            }
            if matches!(task, Task::Child(_)) {
                continue;
            }
            match (&part.task, &new.task) {
                (Task::Allocate(a), Task::Allocate(b)) if a.bytes == b.bytes && a.device == b.device => continue,
                (Task::Allocate(_), _) => return refuse(PARAMETERS_CHANGED, new.node, 0),
                (Task::Free(a), Task::Free(b)) if a == b => continue,
                (Task::Free(_), _) => return refuse(PARAMETERS_CHANGED, new.node, 0),
                (a, b) if !allowed(a, b) => return refuse(PARAMETERS_CHANGED, new.node, 0),
                _ => {}
            }
            let place = self.places.get(&part.node).and_then(|i| flat.steps.get_mut(*i));
            let Some(step) = place else { return refuse(NOT_SUPPORTED, new.node, 0) };
            step.task = task;
        }
        Ok(())
    }
}

/// Whether a node of an executable graph can have this task instead: nodes stay in their context, copies and memsets
/// where their memory is.
pub(crate) fn allowed(old: &Task, new: &Task) -> bool {
    match (old, new) {
        (Task::Copy(a), Task::Copy(b)) => {
            let kinds = |c: &crate::Copy| (c.copy.src.kind, c.copy.dst.kind);
            let flat = |c: &crate::Copy| c.copy.height <= 1 && c.copy.depth <= 1;
            a.context == b.context && kinds(a) == kinds(b) && flat(a) == flat(b)
        }
        (Task::Fill(a), Task::Fill(b)) => a.context == b.context && (a.fill.height > 1) == (b.fill.height > 1),
        (Task::Kernel(a), Task::Kernel(b)) => a.context == b.context,
        (Task::Words(a), Task::Words(b)) => a.context == b.context,
        _ => old.kind() == new.kind(),
    }
}

impl Shape {
    fn find_child(&self, node: CUgraphNode) -> Option<&Shape> {
        self.nodes.iter().find_map(|part| match (&part.task, &part.parts[..]) {
            (Task::Child(_), [child]) if part.node == node => Some(child),
            (_, parts) => parts.iter().find_map(|it| it.find_child(node)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Host;

    const PLAIN: CUgraphEdgeData = CUgraphEdgeData { from_port: 0, to_port: 0, kind: 0, reserved: [0; 5] };

    fn host(data: u64) -> Task {
        Task::Host(Host { function: 1, data })
    }

    fn line(graphs: &mut Graphs, tasks: &[Task]) -> (CUgraph, Vec<CUgraphNode>) {
        let graph = graphs.create(Owner::Program);
        let mut nodes: Vec<CUgraphNode> = Vec::new();
        for task in tasks {
            let after: Vec<Edge> = nodes.last().map(|n| (*n, PLAIN)).into_iter().collect();
            nodes.push(graphs.add_node(graph, &after, task.clone()).unwrap());
        }
        (graph, nodes)
    }

    fn exec(graphs: &mut Graphs, execs: &mut Execs, graph: CUgraph) -> CUgraphExec {
        let exec = Exec::prepare(graphs, graph, 0).unwrap();
        execs.add(graphs, exec).unwrap()
    }

    #[test]
    fn children_are_unfolded_between_what_is_before_and_after_their_node() {
        let mut graphs = Graphs::default();
        let (inner, _) = line(&mut graphs, &[host(1), host(2)]);
        let (graph, nodes) = line(&mut graphs, &[host(0)]);
        let child = graphs.add_child(graph, &[(nodes[0], PLAIN)], inner).unwrap();
        graphs.add_node(graph, &[(child, PLAIN)], host(3)).unwrap();
        let flat = Exec::prepare(&graphs, graph, 0).unwrap().flat;
        let after: Vec<Vec<usize>> = flat.steps.iter().map(|s| s.after.iter().map(|a| a.0).collect()).collect();
        assert_eq!(after, [vec![], vec![0], vec![1], vec![2], vec![3]]);
        assert_eq!(flat.steps[3].node, child);
        assert_eq!(flat.steps[4].task, host(3));
    }

    #[test]
    fn an_update_takes_parameters_and_refuses_another_topology() {
        let (mut graphs, mut execs) = (Graphs::default(), Execs::default());
        let (graph, nodes) = line(&mut graphs, &[host(0), host(1)]);
        let exec = exec(&mut graphs, &mut execs, graph);
        graphs.destroy(graph);
        let (other, _) = line(&mut graphs, &[host(0), host(9)]);
        let (flat, changed) = execs.updated(&graphs, exec, other).unwrap().unwrap();
        assert_eq!((changed, &flat.steps[1].task, flat.steps[1].node), (vec![1], &host(9), nodes[1]));
        let (longer, _) = line(&mut graphs, &[host(0), host(1), host(2)]);
        let refusal = execs.updated(&graphs, exec, longer).unwrap().unwrap_err();
        assert_eq!((refusal.result, refusal.node), (TOPOLOGY_CHANGED, 0));
        // As many nodes, without the edge between them: the one that nothing comes after any more.
        let (apart, first) = line(&mut graphs, &[host(0)]);
        graphs.add_node(apart, &[], host(1)).unwrap();
        let refusal = execs.updated(&graphs, exec, apart).unwrap().unwrap_err();
        assert_eq!((refusal.result, refusal.node), (TOPOLOGY_CHANGED, first[0]));
        let (different, more) = line(&mut graphs, &[host(0), Task::Empty]);
        let refusal = execs.updated(&graphs, exec, different).unwrap().unwrap_err();
        assert_eq!((refusal.result, refusal.node), (TYPE_CHANGED, more[1]));
    }

    #[test]
    fn one_node_of_an_executable_graph_is_changed_by_its_name_in_the_graph() {
        let (mut graphs, mut execs) = (Graphs::default(), Execs::default());
        let (graph, nodes) = line(&mut graphs, &[host(0), host(1)]);
        let exec = exec(&mut graphs, &mut execs, graph);
        let set = |step: &mut Step| {
            step.task = host(5);
            Ok(())
        };
        let mut told = Vec::new();
        let tell = |_, flat: &Flat, place: usize| {
            told.push((place, flat.steps[place].task.clone()));
            Ok(())
        };
        execs.change(exec, nodes[1], set, tell).unwrap();
        assert_eq!(told, [(1, host(5))]);
        assert_eq!(execs.change(exec, 77, |_| Ok(()), |_, _, _| Ok(())), Err(CUDA_ERROR_INVALID_VALUE));
        // A change that the driver refuses is undone.
        let refused = execs.change(exec, nodes[0], set, |_, _, _| Err(CUDA_ERROR_NOT_SUPPORTED));
        assert_eq!((refused, &execs.step(exec, nodes[0]).unwrap().task), (Err(CUDA_ERROR_NOT_SUPPORTED), &host(0)));
        execs.destroy(&mut graphs, exec).unwrap();
        assert_eq!(execs.destroy(&mut graphs, exec), Err(CUDA_ERROR_INVALID_VALUE));
        assert_eq!(execs.take_destroyed(), [0]);
    }
}

//! Graphs, and what is in them.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use rekindle_cuda_abi::arguments::{Count, InArray, Out, OutArray, Room, Text};
use rekindle_cuda_abi::types::*;

use super::call::{call, edges};
use crate::Result;
use crate::graph::{Edge, Graph, Owner};
use crate::store::with;

pub fn cuGraphCreate(out: Out<CUgraph>, flags: u32) -> CUresult {
    call(|| {
        out.require()?;
        ensure(flags == 0, CUDA_ERROR_INVALID_VALUE)?;
        out.put(with(|store| Ok(store.graphs.create(Owner::Program)))?)
    })
}

pub fn cuGraphDestroy(graph: CUgraph) -> CUresult {
    call(|| {
        with(|store| {
            ensure(store.graphs.graph(graph)?.captures == 0, CUDA_ERROR_ILLEGAL_STATE)?;
            ensure(store.graphs.graph(graph)?.is_programs(), CUDA_ERROR_INVALID_VALUE)?;
            store.graphs.destroy(graph);
            Ok(())
        })
    })
}

pub fn cuGraphClone(out: Out<CUgraph>, graph: CUgraph) -> CUresult {
    call(|| {
        out.require()?;
        let clone = with(|store| {
            // Memory has one address, and so one graph.
            let graph_of = store.graphs.graph(graph)?;
            ensure(!graph_of.has_memory() && !graph_of.is_conditional(), CUDA_ERROR_NOT_SUPPORTED)?;
            store.graphs.copy(graph, Owner::Program)
        })?;
        out.put(clone)
    })
}

pub fn cuGraphNodeFindInClone(out: Out<CUgraphNode>, node: CUgraphNode, clone: CUgraph) -> CUresult {
    call(|| {
        out.require()?;
        out.put(with(|store| store.graphs.find_in_clone(node, clone))?)
    })
}

/// Says how many items there are (where the caller has passed no array), or how many of them the arrays hold now.
fn put_number(items: usize, all_null: bool, room: Room) -> Result<()> {
    let number = if all_null { items } else { items.min(room.size()?) };
    room.put(number)
}

/// Fills an array of the caller's with something of a graph's. Without an array, the caller asks how many there are.
fn of_graph<T: Copy + Default>(
    graph: CUgraph,
    array: OutArray<T>,
    count: Room,
    what: impl FnOnce(&Graph) -> Vec<T>,
) -> CUresult {
    call(|| {
        let items = with(|store| Ok(what(store.graphs.graph(graph)?)))?;
        array.fill(&items, &count)?;
        put_number(items.len(), array.is_null(), count)
    })
}

pub fn cuGraphGetNodes(graph: CUgraph, nodes: OutArray<CUgraphNode>, count: Room) -> CUresult {
    of_graph(graph, nodes, count, |g| g.nodes.keys().copied().collect())
}

pub fn cuGraphGetRootNodes(graph: CUgraph, nodes: OutArray<CUgraphNode>, count: Room) -> CUresult {
    let roots = |g: &Graph| g.nodes.iter().filter(|(_, n)| n.after.is_empty()).map(|(h, _)| *h).collect();
    of_graph(graph, nodes, count, roots)
}

/// Edges as parallel arrays. Without an array for what is known of them, there must be nothing to know.
fn list_edges(
    edges: &[(CUgraphNode, CUgraphNode, CUgraphEdgeData)],
    [from, to]: [OutArray<CUgraphNode>; 2],
    data: OutArray<CUgraphEdgeData>,
    count: Room,
) -> Result<()> {
    let plain = edges.iter().all(|e| e.2 == CUgraphEdgeData::default());
    let asked = !(from.is_null() && to.is_null());
    ensure(plain || !data.is_null() || !asked, CUDA_ERROR_LOSSY_QUERY)?;
    let column = |which: fn(&(CUgraphNode, CUgraphNode, CUgraphEdgeData)) -> CUgraphNode| {
        edges.iter().map(which).collect::<Vec<_>>()
    };
    from.fill(&column(|e| e.0), &count)?;
    to.fill(&column(|e| e.1), &count)?;
    data.fill(&edges.iter().map(|e| e.2).collect::<Vec<_>>(), &count)?;
    let all_null = !asked && data.is_null();
    put_number(edges.len(), all_null, count)
}

pub fn cuGraphGetEdges(
    graph: CUgraph,
    from: OutArray<CUgraphNode>,
    to: OutArray<CUgraphNode>,
    count: Room,
) -> CUresult {
    cuGraphGetEdges_v2(graph, from, to, OutArray::null(), count)
}

pub fn cuGraphGetEdges_v2(
    graph: CUgraph,
    from: OutArray<CUgraphNode>,
    to: OutArray<CUgraphNode>,
    data: OutArray<CUgraphEdgeData>,
    count: Room,
) -> CUresult {
    call(|| {
        let edges = with(|store| Ok(store.graphs.graph(graph)?.edges()))?;
        list_edges(&edges, [from, to], data, count)
    })
}

pub fn cuGraphNodeGetDependencies(node: CUgraphNode, nodes: OutArray<CUgraphNode>, count: Room) -> CUresult {
    cuGraphNodeGetDependencies_v2(node, nodes, OutArray::null(), count)
}

pub fn cuGraphNodeGetDependencies_v2(
    node: CUgraphNode,
    nodes: OutArray<CUgraphNode>,
    data: OutArray<CUgraphEdgeData>,
    count: Room,
) -> CUresult {
    call(|| {
        let edges: Vec<_> =
            with(|store| Ok(store.graphs.node(node)?.after.iter().map(|e| (e.0, node, e.1)).collect()))?;
        list_edges(&edges, [nodes, OutArray::null()], data, count)
    })
}

pub fn cuGraphNodeGetDependentNodes(node: CUgraphNode, nodes: OutArray<CUgraphNode>, count: Room) -> CUresult {
    cuGraphNodeGetDependentNodes_v2(node, nodes, OutArray::null(), count)
}

pub fn cuGraphNodeGetDependentNodes_v2(
    node: CUgraphNode,
    nodes: OutArray<CUgraphNode>,
    data: OutArray<CUgraphEdgeData>,
    count: Room,
) -> CUresult {
    call(|| {
        let edges: Vec<_> = with(|store| {
            let graph = store.graphs.graph(store.graphs.graph_of(node)?)?;
            Ok(graph.edges().into_iter().filter(|e| e.0 == node).map(|e| (e.1, node, e.2)).collect())
        })?;
        list_edges(&edges, [nodes, OutArray::null()], data, count)
    })
}

pub fn cuGraphAddDependencies(
    graph: CUgraph,
    from: InArray<CUgraphNode>,
    to: InArray<CUgraphNode>,
    count: Count,
) -> CUresult {
    cuGraphAddDependencies_v2(graph, from, to, InArray::null(), count)
}

pub fn cuGraphAddDependencies_v2(
    graph: CUgraph,
    from: InArray<CUgraphNode>,
    to: InArray<CUgraphNode>,
    data: InArray<CUgraphEdgeData>,
    count: Count,
) -> CUresult {
    call(|| {
        let (from, to) = (edges(from, data, count)?, to.values(count)?);
        with(|store| {
            store.graphs.graph(graph)?;
            from.iter().zip(to).try_for_each(|(from, to)| store.graphs.add_edge(graph, *from, to))
        })
    })
}

pub fn cuGraphRemoveDependencies(
    graph: CUgraph,
    from: InArray<CUgraphNode>,
    to: InArray<CUgraphNode>,
    count: Count,
) -> CUresult {
    cuGraphRemoveDependencies_v2(graph, from, to, InArray::null(), count)
}

pub fn cuGraphRemoveDependencies_v2(
    graph: CUgraph,
    from: InArray<CUgraphNode>,
    to: InArray<CUgraphNode>,
    data: InArray<CUgraphEdgeData>,
    count: Count,
) -> CUresult {
    call(|| {
        let (from, to) = (edges(from, data, count)?, to.values(count)?);
        let told = !data.is_null();
        with(|store| {
            // Memory was handed out for the order that there is.
            ensure(!store.graphs.graph(graph)?.has_memory(), CUDA_ERROR_NOT_SUPPORTED)?;
            let edge = |from: &Edge| (from.0, told.then_some(from.1));
            from.iter().zip(to).try_for_each(|(from, to)| store.graphs.remove_edge(graph, edge(from), to))
        })
    })
}

pub fn cuGraphNodeGetType(node: CUgraphNode, out: Out<u32>) -> CUresult {
    call(|| out.put(with(|store| Ok(store.graphs.node(node)?.task.kind()))?))
}

pub fn cuGraphDestroyNode(node: CUgraphNode) -> CUresult {
    call(|| {
        with(|store| {
            let graph = store.graphs.graph(store.graphs.graph_of(node)?)?;
            ensure(graph.captures == 0, CUDA_ERROR_ILLEGAL_STATE)?;
            // Memory has been handed out.
            ensure(!graph.has_memory(), CUDA_ERROR_NOT_SUPPORTED)?;
            store.graphs.remove_node(node)
        })
    })
}

pub fn cuGraphDebugDotPrint(graph: CUgraph, path: Text, flags: u32) -> CUresult {
    call(|| {
        let path = OsStr::from_bytes(path.read()?.to_bytes());
        let text = with(|store| store.graphs.dot(graph, flags))?;
        std::fs::write(path, text).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)
    })
}

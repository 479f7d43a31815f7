//! Graphs, and what is in them.

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;

use rekindle_cuda_abi::types::*;

use super::{call, edges, ensure, list, put, slice};
use crate::Result;
use crate::exec::is_programs;
use crate::graph::{Edge, Graph, Owner};
use crate::store::with;

pub unsafe fn cuGraphCreate(out: *mut CUgraph, flags: u32) -> CUresult {
    call(|| {
        ensure(flags == 0 && !out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        unsafe { put(out, with(|store| Ok(store.create_graph(Owner::Program)))?) }
    })
}

pub unsafe fn cuGraphDestroy(graph: CUgraph) -> CUresult {
    call(|| {
        with(|store| {
            ensure(store.graph(graph)?.captures == 0, CUDA_ERROR_ILLEGAL_STATE)?;
            ensure(is_programs(store.graph(graph)?), CUDA_ERROR_INVALID_VALUE)?;
            store.drop_graph(graph);
            Ok(())
        })
    })
}

pub unsafe fn cuGraphClone(out: *mut CUgraph, graph: CUgraph) -> CUresult {
    call(|| {
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let clone = with(|store| {
            // Memory has one address, and so one graph.
            ensure(!store.graph(graph)?.has_memory(), CUDA_ERROR_NOT_SUPPORTED)?;
            store.copy_graph(graph, Owner::Program)
        })?;
        unsafe { put(out, clone) }
    })
}

pub unsafe fn cuGraphNodeFindInClone(out: *mut CUgraphNode, node: CUgraphNode, clone: CUgraph) -> CUresult {
    call(|| {
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        unsafe { put(out, with(|store| store.find_in_clone(node, clone))?) }
    })
}

/// Lists something of a graph's.
unsafe fn of_graph<T: Copy + Default>(
    graph: CUgraph,
    array: *mut T,
    count: *mut usize,
    what: impl FnOnce(&Graph) -> Vec<T>,
) -> CUresult {
    call(|| unsafe { list(&with(|store| Ok(what(store.graph(graph)?)))?, array, count) })
}

pub unsafe fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) -> CUresult {
    unsafe { of_graph(graph, nodes, count, |g| g.nodes.keys().copied().collect()) }
}

pub unsafe fn cuGraphGetRootNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) -> CUresult {
    let roots = |g: &Graph| g.nodes.iter().filter(|(_, n)| n.after.is_empty()).map(|(h, _)| *h).collect();
    unsafe { of_graph(graph, nodes, count, roots) }
}

/// Edges as parallel arrays. Without an array for what is known of them, there must be nothing to know.
unsafe fn list_edges(
    edges: &[(CUgraphNode, CUgraphNode, CUgraphEdgeData)],
    [from, to]: [*mut CUgraphNode; 2],
    data: *mut CUgraphEdgeData,
    count: *mut usize,
) -> Result<()> {
    let plain = edges.iter().all(|e| e.2 == CUgraphEdgeData::default());
    let asked = !(from.is_null() && to.is_null());
    ensure(plain || !data.is_null() || !asked, CUDA_ERROR_LOSSY_QUERY)?;
    let column = |which: fn(&(CUgraphNode, CUgraphNode, CUgraphEdgeData)) -> CUgraphNode| {
        edges.iter().map(which).collect::<Vec<_>>()
    };
    unsafe {
        let room = super::read(count)?;
        list(&column(|e| e.0), from, count)?;
        if !to.is_null() {
            count.write_unaligned(room);
            list(&column(|e| e.1), to, count)?;
        }
        if !data.is_null() {
            count.write_unaligned(room);
            list(&edges.iter().map(|e| e.2).collect::<Vec<_>>(), data, count)?;
        }
    }
    Ok(())
}

pub unsafe fn cuGraphGetEdges(
    graph: CUgraph,
    from: *mut CUgraphNode,
    to: *mut CUgraphNode,
    count: *mut usize,
) -> CUresult {
    unsafe { cuGraphGetEdges_v2(graph, from, to, std::ptr::null_mut(), count) }
}

pub unsafe fn cuGraphGetEdges_v2(
    graph: CUgraph,
    from: *mut CUgraphNode,
    to: *mut CUgraphNode,
    data: *mut CUgraphEdgeData,
    count: *mut usize,
) -> CUresult {
    call(|| {
        let edges = with(|store| Ok(store.graph(graph)?.edges()))?;
        unsafe { list_edges(&edges, [from, to], data, count) }
    })
}

pub unsafe fn cuGraphNodeGetDependencies(node: CUgraphNode, nodes: *mut CUgraphNode, count: *mut usize) -> CUresult {
    unsafe { cuGraphNodeGetDependencies_v2(node, nodes, std::ptr::null_mut(), count) }
}

pub unsafe fn cuGraphNodeGetDependencies_v2(
    node: CUgraphNode,
    nodes: *mut CUgraphNode,
    data: *mut CUgraphEdgeData,
    count: *mut usize,
) -> CUresult {
    call(|| {
        let edges: Vec<_> = with(|store| Ok(store.node(node)?.after.iter().map(|e| (e.0, node, e.1)).collect()))?;
        unsafe { list_edges(&edges, [nodes, std::ptr::null_mut()], data, count) }
    })
}

pub unsafe fn cuGraphNodeGetDependentNodes(node: CUgraphNode, nodes: *mut CUgraphNode, count: *mut usize) -> CUresult {
    unsafe { cuGraphNodeGetDependentNodes_v2(node, nodes, std::ptr::null_mut(), count) }
}

pub unsafe fn cuGraphNodeGetDependentNodes_v2(
    node: CUgraphNode,
    nodes: *mut CUgraphNode,
    data: *mut CUgraphEdgeData,
    count: *mut usize,
) -> CUresult {
    call(|| {
        let edges: Vec<_> = with(|store| {
            let graph = store.graph(store.graph_of(node)?)?;
            Ok(graph.edges().into_iter().filter(|e| e.0 == node).map(|e| (e.1, node, e.2)).collect())
        })?;
        unsafe { list_edges(&edges, [nodes, std::ptr::null_mut()], data, count) }
    })
}

pub unsafe fn cuGraphAddDependencies(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    count: usize,
) -> CUresult {
    unsafe { cuGraphAddDependencies_v2(graph, from, to, std::ptr::null(), count) }
}

pub unsafe fn cuGraphAddDependencies_v2(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
) -> CUresult {
    call(|| {
        let (from, to) = unsafe { (edges(from, data, count)?, slice(to, count)?) };
        with(|store| {
            store.graph(graph)?;
            from.iter().zip(to).try_for_each(|(from, to)| store.add_edge(graph, *from, *to))
        })
    })
}

pub unsafe fn cuGraphRemoveDependencies(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    count: usize,
) -> CUresult {
    unsafe { cuGraphRemoveDependencies_v2(graph, from, to, std::ptr::null(), count) }
}

pub unsafe fn cuGraphRemoveDependencies_v2(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
) -> CUresult {
    call(|| {
        let (from, to) = unsafe { (edges(from, data, count)?, slice(to, count)?) };
        let told = !data.is_null();
        with(|store| {
            // Memory was handed out for the order that there is.
            ensure(!store.graph(graph)?.has_memory(), CUDA_ERROR_NOT_SUPPORTED)?;
            let edge = |from: &Edge| (from.0, told.then_some(from.1));
            from.iter().zip(to).try_for_each(|(from, to)| store.remove_edge(graph, edge(from), *to))
        })
    })
}

pub unsafe fn cuGraphNodeGetType(node: CUgraphNode, out: *mut u32) -> CUresult {
    call(|| unsafe { put(out, with(|store| Ok(store.node(node)?.task.kind()))?) })
}

pub unsafe fn cuGraphDestroyNode(node: CUgraphNode) -> CUresult {
    call(|| {
        with(|store| {
            let graph = store.graph(store.graph_of(node)?)?;
            ensure(graph.captures == 0, CUDA_ERROR_ILLEGAL_STATE)?;
            // Memory has been handed out.
            ensure(!graph.has_memory(), CUDA_ERROR_NOT_SUPPORTED)?;
            store.remove_node(node)
        })
    })
}

pub unsafe fn cuGraphDebugDotPrint(graph: CUgraph, path: *const c_char, flags: u32) -> CUresult {
    call(|| {
        ensure(!path.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let path = OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes());
        let text = with(|store| store.dot(graph, flags))?;
        std::fs::write(path, text).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)
    })
}

//! Nodes: added with what they do.

use rekindle_cuda_abi::arguments::{Count, In, InArray, InOut, NodeParams, Out};
use rekindle_cuda_abi::types::*;

use super::call::{call, edges};
use super::params::{self, fill_task, kernel_task, kernel_task_v1, task_of, words_task};
use crate::Result;
use crate::driver::driver;
use crate::store::with;
use crate::task::{Copy, Memory, Task};

/// Edges of which nothing is known.
const PLAIN: InArray<CUgraphEdgeData> = InArray::null();

/// The dependencies of a new node: nodes, and the data of the edges from them.
type After<'c> = (InArray<'c, CUgraphNode>, InArray<'c, CUgraphEdgeData>, Count);

/// Adds a node with the task that `task` gives.
fn add(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    (nodes, data, count): After,
    task: impl FnOnce() -> Result<Task>,
) -> CUresult {
    call(|| {
        out.require()?;
        let after = edges(nodes, data, count)?;
        with(|store| store.graphs.graph(graph).map(drop))?;
        let task = task()?;
        out.put(with(|store| store.graphs.add_node(graph, &after, task))?)
    })
}

pub fn cuGraphAddKernelNode_v2(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    nodes: InArray<CUgraphNode>,
    count: Count,
    params: In<CudaKernelNodeParams>,
) -> CUresult {
    add(out, graph, (nodes, PLAIN, count), || kernel_task(params.read()?))
}

pub fn cuGraphAddKernelNode(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    nodes: InArray<CUgraphNode>,
    count: Count,
    params: In<CudaKernelNodeParamsV1>,
) -> CUresult {
    add(out, graph, (nodes, PLAIN, count), || kernel_task_v1(params))
}

pub fn cuGraphAddMemcpyNode(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    nodes: InArray<CUgraphNode>,
    count: Count,
    params: In<CudaMemcpy3d>,
    context: CUcontext,
) -> CUresult {
    add(out, graph, (nodes, PLAIN, count), || params::copy_task(*params.read()?, context))
}

pub fn cuGraphAddMemsetNode(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    nodes: InArray<CUgraphNode>,
    count: Count,
    params: In<CudaMemsetNodeParams>,
    context: CUcontext,
) -> CUresult {
    add(out, graph, (nodes, PLAIN, count), || fill_task(*params.read()?, context))
}

pub fn cuGraphAddHostNode(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    nodes: InArray<CUgraphNode>,
    count: Count,
    params: In<CudaHostNodeParams>,
) -> CUresult {
    add(out, graph, (nodes, PLAIN, count), || params::host_task(*params.read()?))
}

pub fn cuGraphAddEmptyNode(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    nodes: InArray<CUgraphNode>,
    count: Count,
) -> CUresult {
    add(out, graph, (nodes, PLAIN, count), || Ok(Task::Empty))
}

pub fn cuGraphAddEventRecordNode(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    nodes: InArray<CUgraphNode>,
    count: Count,
    event: CUevent,
) -> CUresult {
    add(out, graph, (nodes, PLAIN, count), || params::event(event).map(Task::Record))
}

pub fn cuGraphAddEventWaitNode(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    nodes: InArray<CUgraphNode>,
    count: Count,
    event: CUevent,
) -> CUresult {
    add(out, graph, (nodes, PLAIN, count), || params::event(event).map(Task::Wait))
}

pub fn cuGraphAddBatchMemOpNode(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    nodes: InArray<CUgraphNode>,
    count: Count,
    params: In<CudaBatchMemOpNodeParams>,
) -> CUresult {
    add(out, graph, (nodes, PLAIN, count), || words_task(params.read()?))
}

fn add_child(out: Out<CUgraphNode>, graph: CUgraph, after: After, child: CUgraph) -> CUresult {
    call(|| {
        out.require()?;
        let after = edges(after.0, after.1, after.2)?;
        out.put(with(|store| store.graphs.add_child(graph, &after, child))?)
    })
}

pub fn cuGraphAddChildGraphNode(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    nodes: InArray<CUgraphNode>,
    count: Count,
    child: CUgraph,
) -> CUresult {
    add_child(out, graph, (nodes, PLAIN, count), child)
}

/// Its memory is there from the start, at the address that the graph's launches use; peers reach all memory anyway.
fn add_memory(out: Out<CUgraphNode>, graph: CUgraph, after: After, params: InOut<CudaMemAllocNodeParams>) -> CUresult {
    call(|| {
        out.require()?;
        let after = edges(after.0, after.1, after.2)?;
        let mut wanted = *params.read()?;
        const PINNED: u32 = 1;
        const DEVICE: u32 = 1;
        let pool = &wanted.pool;
        let good = pool.kind == PINNED && pool.handle_types == 0 && pool.location_type == DEVICE && wanted.bytes > 0;
        ensure(good && (wanted.access_count == 0 || !wanted.access.is_null()), CUDA_ERROR_INVALID_VALUE)?;
        with(|store| {
            store.graphs.graph(graph)?;
            store.graphs.check_dependencies(graph, &after, None)
        })?;
        let (device, bytes) = (pool.location_id, wanted.bytes);
        let address = driver()?.allocate(device, bytes)?;
        let node = with(|store| {
            store.graphs.memory.add(address, bytes, device);
            let task = Task::Allocate(Memory { address, bytes, device });
            store.graphs.add_node(graph, &after, task).inspect_err(|_| store.graphs.memory.release(address))
        })?;
        wanted.address = address;
        params.put(wanted)?;
        out.put(node)
    })
}

pub fn cuGraphAddMemAllocNode(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    nodes: InArray<CUgraphNode>,
    count: Count,
    params: InOut<CudaMemAllocNodeParams>,
) -> CUresult {
    add_memory(out, graph, (nodes, PLAIN, count), params)
}

fn add_free(out: Out<CUgraphNode>, graph: CUgraph, after: After, address: CUdeviceptr) -> CUresult {
    add(out, graph, after, || {
        with(|store| {
            let again = |g: &crate::graph::Graph| g.nodes.values().any(|n| n.task == Task::Free(address));
            ensure(store.graphs.memory.contains(address), CUDA_ERROR_INVALID_VALUE)?;
            // Once in a graph.
            ensure(!again(store.graphs.graph(graph)?), CUDA_ERROR_INVALID_VALUE)?;
            Ok(Task::Free(address))
        })
    })
}

pub fn cuGraphAddMemFreeNode(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    nodes: InArray<CUgraphNode>,
    count: Count,
    address: CUdeviceptr,
) -> CUresult {
    add_free(out, graph, (nodes, PLAIN, count), address)
}

pub fn cuGraphConditionalHandleCreate(
    out: Out<CUgraphConditionalHandle>,
    graph: CUgraph,
    context: CUcontext,
    default: u32,
    flags: u32,
) -> CUresult {
    /// `CU_GRAPH_COND_ASSIGN_DEFAULT`.
    const ASSIGN_DEFAULT: u32 = 1;
    call(|| {
        out.require()?;
        with(|store| store.graphs.graph(graph).map(drop))?;
        ensure(flags <= ASSIGN_DEFAULT, CUDA_ERROR_INVALID_VALUE)?;
        known_context(context)?;
        out.put(with(|store| store.graphs.add_condition(graph, context, default, flags == ASSIGN_DEFAULT))?)
    })
}

fn known_context(context: CUcontext) -> Result<()> {
    ensure(context != 0, CUDA_ERROR_INVALID_CONTEXT)?;
    driver()?.device(context).map(drop)
}

/// The bodies are listed where the parameters say afterwards.
fn add_conditional(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    after: After,
    params: InOut<CudaConditionalNodeParams>,
) -> CUresult {
    call(|| {
        out.require()?;
        let after = edges(after.0, after.1, after.2)?;
        let mut wanted = *params.read()?;
        known_context(wanted.context)?;
        let (node, bodies) = with(|store| store.graphs.add_conditional(graph, &after, &wanted))?;
        wanted.bodies = bodies;
        params.put(wanted)?;
        out.put(node)
    })
}

pub fn cuGraphAddNode(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    nodes: InArray<CUgraphNode>,
    count: Count,
    params: InOut<CUgraphNodeParams>,
) -> CUresult {
    cuGraphAddNode_v2(out, graph, nodes, PLAIN, count, params)
}

pub fn cuGraphAddNode_v2(
    out: Out<CUgraphNode>,
    graph: CUgraph,
    nodes: InArray<CUgraphNode>,
    data: InArray<CUgraphEdgeData>,
    count: Count,
    params: InOut<CUgraphNodeParams>,
) -> CUresult {
    let after = (nodes, data, count);
    let wanted = match params.read() {
        Ok(wanted) => wanted,
        Err(error) => return error,
    };
    match wanted.node() {
        NodeParams::Child(child) => add_child(out, graph, after, child),
        NodeParams::Conditional => add_conditional(out, graph, after, params.conditional()),
        NodeParams::Allocate => add_memory(out, graph, after, params.allocation()),
        NodeParams::Free(address) => add_free(out, graph, after, address),
        _ => add(out, graph, after, || task_of(wanted)),
    }
}

pub fn cuGraphChildGraphNodeGetGraph(node: CUgraphNode, out: Out<CUgraph>) -> CUresult {
    call(|| {
        let child = with(|store| match store.graphs.node(node)?.task {
            Task::Child(child) => Ok(child),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        })?;
        out.put(child)
    })
}

pub fn cuGraphKernelNodeGetParams_v2(node: CUgraphNode, out: Out<CudaKernelNodeParams>) -> CUresult {
    call(|| {
        out.require()?;
        with(|store| match &mut store.graphs.node_mut(node)?.task {
            Task::Kernel(kernel) => out.put(params::shown(kernel)),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        })
    })
}

pub fn cuGraphKernelNodeGetParams(node: CUgraphNode, out: Out<CudaKernelNodeParamsV1>) -> CUresult {
    call(|| {
        out.require()?;
        with(|store| match &mut store.graphs.node_mut(node)?.task {
            Task::Kernel(kernel) => {
                let mut shown = params::shown(kernel);
                shown.v1.func = kernel.function;
                out.put(shown.v1)
            }
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        })
    })
}

/// Gives a node another task of its kind.
pub(super) fn set(node: CUgraphNode, task: impl FnOnce() -> Result<Task>) -> CUresult {
    call(|| {
        with(|store| store.graphs.node(node).map(drop))?;
        let mut task = task()?;
        with(|store| {
            let old = &mut store.graphs.node_mut(node)?.task;
            ensure(old.kind() == task.kind(), CUDA_ERROR_INVALID_VALUE)?;
            if let (Task::Kernel(old), Task::Kernel(new)) = (&*old, &mut task) {
                new.attributes.clone_from(&old.attributes);
            }
            *old = task;
            Ok(())
        })
    })
}

pub fn cuGraphKernelNodeSetParams_v2(node: CUgraphNode, params: In<CudaKernelNodeParams>) -> CUresult {
    set(node, || kernel_task(params.read()?))
}

pub fn cuGraphKernelNodeSetParams(node: CUgraphNode, params: In<CudaKernelNodeParamsV1>) -> CUresult {
    set(node, || kernel_task_v1(params))
}

pub fn cuGraphMemcpyNodeGetParams(node: CUgraphNode, out: Out<CudaMemcpy3d>) -> CUresult {
    get(node, out, |task| if let Task::Copy(Copy { copy, .. }) = task { Some(*copy) } else { None })
}

pub fn cuGraphMemcpyNodeSetParams(node: CUgraphNode, params: In<CudaMemcpy3d>) -> CUresult {
    set(node, || params::copy_task(*params.read()?, context_of(node)?))
}

/// The context that a node of a copy or memset has.
fn context_of(node: CUgraphNode) -> Result<CUcontext> {
    with(|store| {
        Ok(match &store.graphs.node(node)?.task {
            Task::Copy(copy) => copy.context,
            Task::Fill(fill) => fill.context,
            _ => 0,
        })
    })
}

/// Something of a node's task.
fn get<T>(node: CUgraphNode, out: Out<T>, what: impl FnOnce(&Task) -> Option<T>) -> CUresult {
    call(|| {
        let found = with(|store| what(&store.graphs.node(node)?.task).ok_or(CUDA_ERROR_INVALID_VALUE))?;
        out.put(found)
    })
}

pub fn cuGraphMemsetNodeGetParams(node: CUgraphNode, out: Out<CudaMemsetNodeParams>) -> CUresult {
    get(node, out, |task| if let Task::Fill(fill) = task { Some(fill.fill) } else { None })
}

pub fn cuGraphMemsetNodeSetParams(node: CUgraphNode, params: In<CudaMemsetNodeParams>) -> CUresult {
    set(node, || fill_task(*params.read()?, context_of(node)?))
}

pub fn cuGraphHostNodeGetParams(node: CUgraphNode, out: Out<CudaHostNodeParams>) -> CUresult {
    let params = |host: &crate::Host| CudaHostNodeParams { function: host.function, data: host.data };
    get(node, out, |task| if let Task::Host(host) = task { Some(params(host)) } else { None })
}

pub fn cuGraphHostNodeSetParams(node: CUgraphNode, params: In<CudaHostNodeParams>) -> CUresult {
    set(node, || params::host_task(*params.read()?))
}

pub fn cuGraphEventRecordNodeGetEvent(node: CUgraphNode, out: Out<CUevent>) -> CUresult {
    get(node, out, |task| if let Task::Record(event) = task { Some(*event) } else { None })
}

pub fn cuGraphEventRecordNodeSetEvent(node: CUgraphNode, event: CUevent) -> CUresult {
    set(node, || params::event(event).map(Task::Record))
}

pub fn cuGraphEventWaitNodeGetEvent(node: CUgraphNode, out: Out<CUevent>) -> CUresult {
    get(node, out, |task| if let Task::Wait(event) = task { Some(*event) } else { None })
}

pub fn cuGraphEventWaitNodeSetEvent(node: CUgraphNode, event: CUevent) -> CUresult {
    set(node, || params::event(event).map(Task::Wait))
}

/// The operations that are handed out are the node's own.
pub fn cuGraphBatchMemOpNodeGetParams(node: CUgraphNode, out: Out<CudaBatchMemOpNodeParams>) -> CUresult {
    get(node, out, |task| match task {
        Task::Words(w) => Some(CudaBatchMemOpNodeParams {
            context: w.context,
            count: w.operations.len() as u32,
            operations: w.operations.as_ptr().cast_mut(),
            flags: w.flags,
        }),
        _ => None,
    })
}

pub fn cuGraphBatchMemOpNodeSetParams(node: CUgraphNode, params: In<CudaBatchMemOpNodeParams>) -> CUresult {
    set(node, || words_task(params.read()?))
}

pub fn cuGraphMemAllocNodeGetParams(node: CUgraphNode, out: Out<CudaMemAllocNodeParams>) -> CUresult {
    get(node, out, |task| match task {
        Task::Allocate(memory) => Some(CudaMemAllocNodeParams {
            pool: CUmemPoolProps {
                kind: 1,
                handle_types: 0,
                location_type: 1,
                location_id: memory.device,
                security_attributes: 0,
                maximum: 0,
                usage: 0,
                reserved: [0; 54],
            },
            access: std::ptr::null(),
            access_count: 0,
            bytes: memory.bytes,
            address: memory.address,
        }),
        _ => None,
    })
}

pub fn cuGraphMemFreeNodeGetParams(node: CUgraphNode, out: Out<CUdeviceptr>) -> CUresult {
    get(node, out, |task| if let Task::Free(address) = task { Some(*address) } else { None })
}

pub fn cuGraphNodeSetParams(node: CUgraphNode, params: In<CUgraphNodeParams>) -> CUresult {
    set(node, || task_of(params.read()?))
}

pub fn cuGraphKernelNodeGetAttribute(node: CUgraphNode, attribute: u32, out: Out<CUlaunchAttributeValue>) -> CUresult {
    call(|| {
        ensure(!out.is_null() && params::is_node_attribute(attribute), CUDA_ERROR_INVALID_VALUE)?;
        let value = with(|store| match &store.graphs.node(node)?.task {
            Task::Kernel(kernel) => {
                Ok(kernel.attributes.get(&attribute).copied().unwrap_or_else(|| params::default_attribute(attribute)))
            }
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        })?;
        out.put(value)
    })
}

pub fn cuGraphKernelNodeSetAttribute(node: CUgraphNode, attribute: u32, value: In<CUlaunchAttributeValue>) -> CUresult {
    call(|| {
        let value = *value.read()?;
        ensure(params::is_node_attribute(attribute), CUDA_ERROR_INVALID_VALUE)?;
        ensure(attribute != params::DEVICE_UPDATABLE, CUDA_ERROR_NOT_SUPPORTED)?;
        with(|store| match &mut store.graphs.node_mut(node)?.task {
            Task::Kernel(kernel) => {
                kernel.attributes.insert(attribute, value);
                Ok(())
            }
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        })
    })
}

pub fn cuGraphKernelNodeCopyAttributes(to: CUgraphNode, from: CUgraphNode) -> CUresult {
    call(|| {
        with(|store| {
            let Task::Kernel(source) = &store.graphs.node(from)?.task else { return Err(CUDA_ERROR_INVALID_VALUE) };
            let attributes = source.attributes.clone();
            let Task::Kernel(target) = &mut store.graphs.node_mut(to)?.task else {
                return Err(CUDA_ERROR_INVALID_VALUE);
            };
            target.attributes = attributes;
            Ok(())
        })
    })
}

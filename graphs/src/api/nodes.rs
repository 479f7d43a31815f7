//! Nodes: added with what they do.

use rekindle_cuda_abi::types::*;

use super::params::{self, fill_task, kernel_task, kernel_task_v1, task_of, words_task};
use super::{call, edges, ensure, put, put_if, read};
use crate::Result;
use crate::driver::driver;
use crate::store::with;
use crate::task::{Copy, Memory, Task};

/// Adds a node with the task that `task` gives.
unsafe fn add(
    out: *mut CUgraphNode,
    graph: CUgraph,
    (nodes, data, count): (*const CUgraphNode, *const CUgraphEdgeData, usize),
    task: impl FnOnce() -> Result<Task>,
) -> CUresult {
    call(|| {
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let after = unsafe { edges(nodes, data, count) }?;
        with(|store| store.graph(graph).map(drop))?;
        let task = task()?;
        unsafe { put(out, with(|store| store.add_node(graph, &after, task))?) }
    })
}

const PLAIN: *const CUgraphEdgeData = std::ptr::null();

pub unsafe fn cuGraphAddKernelNode_v2(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    params: *const CudaKernelNodeParams,
) -> CUresult {
    unsafe { add(out, graph, (nodes, PLAIN, count), || kernel_task(&read(params)?)) }
}

pub unsafe fn cuGraphAddKernelNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    params: *const CudaKernelNodeParamsV1,
) -> CUresult {
    unsafe { add(out, graph, (nodes, PLAIN, count), || kernel_task_v1(params)) }
}

pub unsafe fn cuGraphAddMemcpyNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    params: *const CudaMemcpy3d,
    context: CUcontext,
) -> CUresult {
    unsafe { add(out, graph, (nodes, PLAIN, count), || params::copy_task(params, context)) }
}

pub unsafe fn cuGraphAddMemsetNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    params: *const CudaMemsetNodeParams,
    context: CUcontext,
) -> CUresult {
    unsafe { add(out, graph, (nodes, PLAIN, count), || fill_task(params, context)) }
}

pub unsafe fn cuGraphAddHostNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    params: *const CudaHostNodeParams,
) -> CUresult {
    unsafe { add(out, graph, (nodes, PLAIN, count), || params::host_task(params)) }
}

pub unsafe fn cuGraphAddEmptyNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
) -> CUresult {
    unsafe { add(out, graph, (nodes, PLAIN, count), || Ok(Task::Empty)) }
}

pub unsafe fn cuGraphAddEventRecordNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    event: CUevent,
) -> CUresult {
    unsafe { add(out, graph, (nodes, PLAIN, count), || params::event(event).map(Task::Record)) }
}

pub unsafe fn cuGraphAddEventWaitNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    event: CUevent,
) -> CUresult {
    unsafe { add(out, graph, (nodes, PLAIN, count), || params::event(event).map(Task::Wait)) }
}

pub unsafe fn cuGraphAddBatchMemOpNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    params: *const CudaBatchMemOpNodeParams,
) -> CUresult {
    unsafe { add(out, graph, (nodes, PLAIN, count), || words_task(&read(params)?)) }
}

unsafe fn add_child(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: (*const CUgraphNode, *const CUgraphEdgeData, usize),
    child: CUgraph,
) -> CUresult {
    call(|| {
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let after = unsafe { edges(after.0, after.1, after.2) }?;
        unsafe { put(out, with(|store| store.add_child(graph, &after, child))?) }
    })
}

pub unsafe fn cuGraphAddChildGraphNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    child: CUgraph,
) -> CUresult {
    unsafe { add_child(out, graph, (nodes, PLAIN, count), child) }
}

/// Its memory is there from the start, at the address that the graph's launches use; peers reach all memory anyway.
unsafe fn add_memory(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: (*const CUgraphNode, *const CUgraphEdgeData, usize),
    params: *mut CudaMemAllocNodeParams,
) -> CUresult {
    call(|| {
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let after = unsafe { edges(after.0, after.1, after.2) }?;
        let mut wanted = unsafe { read(params) }?;
        const PINNED: u32 = 1;
        const DEVICE: u32 = 1;
        let pool = &wanted.pool;
        let good = pool.kind == PINNED && pool.handle_types == 0 && pool.location_type == DEVICE && wanted.bytes > 0;
        ensure(good && (wanted.access_count == 0 || !wanted.access.is_null()), CUDA_ERROR_INVALID_VALUE)?;
        with(|store| {
            store.graph(graph)?;
            store.check_dependencies(graph, &after, None)
        })?;
        let (device, bytes) = (pool.location_id, wanted.bytes);
        let address = driver()?.allocate(device, bytes)?;
        let node = with(|store| {
            store.new_memory(address, bytes, device);
            let task = Task::Allocate(Memory { address, bytes, device });
            store.add_node(graph, &after, task).inspect_err(|_| store.leave_memory(address))
        })?;
        wanted.address = address;
        unsafe {
            params.write_unaligned(wanted);
            put(out, node)
        }
    })
}

pub unsafe fn cuGraphAddMemAllocNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    params: *mut CudaMemAllocNodeParams,
) -> CUresult {
    unsafe { add_memory(out, graph, (nodes, PLAIN, count), params) }
}

unsafe fn add_free(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: (*const CUgraphNode, *const CUgraphEdgeData, usize),
    address: CUdeviceptr,
) -> CUresult {
    unsafe {
        add(out, graph, after, || {
            with(|store| {
                let again = |g: &crate::graph::Graph| g.nodes.values().any(|n| n.task == Task::Free(address));
                ensure(store.memory.contains_key(&address), CUDA_ERROR_INVALID_VALUE)?;
                // Once in a graph.
                ensure(!again(store.graph(graph)?), CUDA_ERROR_INVALID_VALUE)?;
                Ok(Task::Free(address))
            })
        })
    }
}

pub unsafe fn cuGraphAddMemFreeNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    address: CUdeviceptr,
) -> CUresult {
    unsafe { add_free(out, graph, (nodes, PLAIN, count), address) }
}

pub unsafe fn cuGraphAddNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    params: *mut CUgraphNodeParams,
) -> CUresult {
    unsafe { cuGraphAddNode_v2(out, graph, nodes, PLAIN, count, params) }
}

pub unsafe fn cuGraphAddNode_v2(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
    params: *mut CUgraphNodeParams,
) -> CUresult {
    let after = (nodes, data, count);
    if params.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    unsafe {
        let words = std::ptr::addr_of_mut!((*params).words);
        match (*params).kind {
            4 => add_child(out, graph, after, words.cast::<CUgraph>().read_unaligned()),
            10 => add_memory(out, graph, after, words.cast()),
            11 => add_free(out, graph, after, words.cast::<CUdeviceptr>().read_unaligned()),
            _ => add(out, graph, after, || task_of(&params.read_unaligned())),
        }
    }
}

pub unsafe fn cuGraphChildGraphNodeGetGraph(node: CUgraphNode, out: *mut CUgraph) -> CUresult {
    call(|| {
        let child = with(|store| match store.node(node)?.task {
            Task::Child(child) => Ok(child),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        })?;
        unsafe { put(out, child) }
    })
}

pub unsafe fn cuGraphKernelNodeGetParams_v2(node: CUgraphNode, out: *mut CudaKernelNodeParams) -> CUresult {
    call(|| {
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        with(|store| match &mut store.node_mut(node)?.task {
            Task::Kernel(kernel) => unsafe { put(out, params::shown(kernel)) },
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        })
    })
}

pub unsafe fn cuGraphKernelNodeGetParams(node: CUgraphNode, out: *mut CudaKernelNodeParamsV1) -> CUresult {
    call(|| {
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        with(|store| match &mut store.node_mut(node)?.task {
            Task::Kernel(kernel) => {
                let mut shown = params::shown(kernel);
                shown.v1.func = kernel.function;
                unsafe { put(out, shown.v1) }
            }
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        })
    })
}

/// Gives a node another task of its kind.
pub(super) fn set(node: CUgraphNode, task: impl FnOnce() -> Result<Task>) -> CUresult {
    call(|| {
        with(|store| store.node(node).map(drop))?;
        let mut task = task()?;
        with(|store| {
            let old = &mut store.node_mut(node)?.task;
            ensure(old.kind() == task.kind(), CUDA_ERROR_INVALID_VALUE)?;
            if let (Task::Kernel(old), Task::Kernel(new)) = (&*old, &mut task) {
                new.attributes.clone_from(&old.attributes);
            }
            *old = task;
            Ok(())
        })
    })
}

pub unsafe fn cuGraphKernelNodeSetParams_v2(node: CUgraphNode, params: *const CudaKernelNodeParams) -> CUresult {
    set(node, || unsafe { kernel_task(&read(params)?) })
}

pub unsafe fn cuGraphKernelNodeSetParams(node: CUgraphNode, params: *const CudaKernelNodeParamsV1) -> CUresult {
    set(node, || unsafe { kernel_task_v1(params) })
}

pub unsafe fn cuGraphMemcpyNodeGetParams(node: CUgraphNode, out: *mut CudaMemcpy3d) -> CUresult {
    get(node, out, |task| if let Task::Copy(Copy { copy, .. }) = task { Some(*copy) } else { None })
}

pub unsafe fn cuGraphMemcpyNodeSetParams(node: CUgraphNode, params: *const CudaMemcpy3d) -> CUresult {
    set(node, || unsafe { params::copy_task(params, context_of(node)?) })
}

/// The context that a node of a copy or memset has.
fn context_of(node: CUgraphNode) -> Result<CUcontext> {
    with(|store| {
        Ok(match &store.node(node)?.task {
            Task::Copy(copy) => copy.context,
            Task::Fill(fill) => fill.context,
            _ => 0,
        })
    })
}

/// Something of a node's task.
fn get<T>(node: CUgraphNode, out: *mut T, what: impl FnOnce(&Task) -> Option<T>) -> CUresult {
    call(|| {
        let found = with(|store| what(&store.node(node)?.task).ok_or(CUDA_ERROR_INVALID_VALUE))?;
        unsafe { put(out, found) }
    })
}

pub unsafe fn cuGraphMemsetNodeGetParams(node: CUgraphNode, out: *mut CudaMemsetNodeParams) -> CUresult {
    get(node, out, |task| if let Task::Fill(fill) = task { Some(fill.fill) } else { None })
}

pub unsafe fn cuGraphMemsetNodeSetParams(node: CUgraphNode, params: *const CudaMemsetNodeParams) -> CUresult {
    set(node, || unsafe { fill_task(params, context_of(node)?) })
}

pub unsafe fn cuGraphHostNodeGetParams(node: CUgraphNode, out: *mut CudaHostNodeParams) -> CUresult {
    let params = |host: &crate::Host| CudaHostNodeParams { function: host.function, data: host.data };
    get(node, out, |task| if let Task::Host(host) = task { Some(params(host)) } else { None })
}

pub unsafe fn cuGraphHostNodeSetParams(node: CUgraphNode, params: *const CudaHostNodeParams) -> CUresult {
    set(node, || unsafe { params::host_task(params) })
}

pub unsafe fn cuGraphEventRecordNodeGetEvent(node: CUgraphNode, out: *mut CUevent) -> CUresult {
    get(node, out, |task| if let Task::Record(event) = task { Some(*event) } else { None })
}

pub unsafe fn cuGraphEventRecordNodeSetEvent(node: CUgraphNode, event: CUevent) -> CUresult {
    set(node, || params::event(event).map(Task::Record))
}

pub unsafe fn cuGraphEventWaitNodeGetEvent(node: CUgraphNode, out: *mut CUevent) -> CUresult {
    get(node, out, |task| if let Task::Wait(event) = task { Some(*event) } else { None })
}

pub unsafe fn cuGraphEventWaitNodeSetEvent(node: CUgraphNode, event: CUevent) -> CUresult {
    set(node, || params::event(event).map(Task::Wait))
}

/// The operations that are handed out are the node's own.
pub unsafe fn cuGraphBatchMemOpNodeGetParams(node: CUgraphNode, out: *mut CudaBatchMemOpNodeParams) -> CUresult {
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

pub unsafe fn cuGraphBatchMemOpNodeSetParams(node: CUgraphNode, params: *const CudaBatchMemOpNodeParams) -> CUresult {
    set(node, || unsafe { words_task(&read(params)?) })
}

pub unsafe fn cuGraphMemAllocNodeGetParams(node: CUgraphNode, out: *mut CudaMemAllocNodeParams) -> CUresult {
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

pub unsafe fn cuGraphMemFreeNodeGetParams(node: CUgraphNode, out: *mut CUdeviceptr) -> CUresult {
    get(node, out, |task| if let Task::Free(address) = task { Some(*address) } else { None })
}

pub unsafe fn cuGraphNodeSetParams(node: CUgraphNode, params: *mut CUgraphNodeParams) -> CUresult {
    set(node, || unsafe { task_of(&read(params)?) })
}

pub unsafe fn cuGraphKernelNodeGetAttribute(
    node: CUgraphNode,
    attribute: u32,
    out: *mut CUlaunchAttributeValue,
) -> CUresult {
    call(|| {
        ensure(!out.is_null() && params::is_node_attribute(attribute), CUDA_ERROR_INVALID_VALUE)?;
        let value = with(|store| match &store.node(node)?.task {
            Task::Kernel(kernel) => {
                Ok(kernel.attributes.get(&attribute).copied().unwrap_or_else(|| params::default_attribute(attribute)))
            }
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        })?;
        unsafe { put_if(out, value) };
        Ok(())
    })
}

pub unsafe fn cuGraphKernelNodeSetAttribute(
    node: CUgraphNode,
    attribute: u32,
    value: *const CUlaunchAttributeValue,
) -> CUresult {
    call(|| {
        let value = unsafe { read(value) }?;
        ensure(params::is_node_attribute(attribute), CUDA_ERROR_INVALID_VALUE)?;
        ensure(attribute != params::DEVICE_UPDATABLE, CUDA_ERROR_NOT_SUPPORTED)?;
        with(|store| match &mut store.node_mut(node)?.task {
            Task::Kernel(kernel) => {
                kernel.attributes.insert(attribute, value);
                Ok(())
            }
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        })
    })
}

pub unsafe fn cuGraphKernelNodeCopyAttributes(to: CUgraphNode, from: CUgraphNode) -> CUresult {
    call(|| {
        with(|store| {
            let Task::Kernel(source) = &store.node(from)?.task else { return Err(CUDA_ERROR_INVALID_VALUE) };
            let attributes = source.attributes.clone();
            let Task::Kernel(target) = &mut store.node_mut(to)?.task else { return Err(CUDA_ERROR_INVALID_VALUE) };
            target.attributes = attributes;
            Ok(())
        })
    })
}

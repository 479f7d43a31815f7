//! Executable graphs.

use std::ffi::c_char;

use rekindle_cuda_abi::arguments::{Count, In, InOut, Out, OutArray};
use rekindle_cuda_abi::types::*;

use super::call::call;
use super::params::{self, copy_task, fill_task, host_task, kernel_task, kernel_task_v1, task_of, words_task};
use crate::Result;
use crate::driver::driver;
use crate::exec::{AUTO_FREE, Exec, Refusal, TOPOLOGY_CHANGED, TYPE_CHANGED, allowed};
use crate::hook;
use crate::steps::{Flat, Step};
use crate::store::{Store, with};
use crate::task::Task;

/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`, `..._DEVICE_LAUNCH`, `..._USE_NODE_PRIORITY`.
const UPLOAD: u64 = 2;
const DEVICE_LAUNCH: u64 = 4;
const NODE_PRIORITY: u64 = 8;

fn instantiate(graph: CUgraph, flags: u64) -> Result<CUgraphExec> {
    ensure(flags & !(AUTO_FREE | UPLOAD | DEVICE_LAUNCH | NODE_PRIORITY) == 0, CUDA_ERROR_INVALID_VALUE)?;
    let driver = driver()?;
    ensure(driver.current()? != 0, CUDA_ERROR_INVALID_CONTEXT)?;
    let mut exec = with(|store| Exec::prepare(&store.graphs, graph, flags & !UPLOAD))?;
    ensure(flags & DEVICE_LAUNCH == 0, CUDA_ERROR_NOT_SUPPORTED)?;
    exec.made = driver.instantiate(&exec.flat, flags & NODE_PRIORITY)?;
    let made = exec.made;
    with(|store| store.execs.add(&mut store.graphs, exec)).inspect_err(|_| driver.destroy(made))
}

pub fn cuGraphInstantiateWithFlags(out: Out<CUgraphExec>, graph: CUgraph, flags: u64) -> CUresult {
    call(|| {
        out.require()?;
        ensure(flags & UPLOAD == 0, CUDA_ERROR_INVALID_VALUE)?;
        out.put(instantiate(graph, flags)?)
    })
}

pub fn cuGraphInstantiate_v2(
    out: Out<CUgraphExec>,
    graph: CUgraph,
    error_node: Out<CUgraphNode>,
    log: OutArray<c_char>,
    log_size: Count,
) -> CUresult {
    call(|| {
        out.require()?;
        error_node.put_if(0);
        log.put_first(0, log_size);
        out.put(instantiate(graph, 0)?)
    })
}

pub fn cuGraphInstantiate(
    out: Out<CUgraphExec>,
    graph: CUgraph,
    error_node: Out<CUgraphNode>,
    log: OutArray<c_char>,
    log_size: Count,
) -> CUresult {
    cuGraphInstantiate_v2(out, graph, error_node, log, log_size)
}

pub fn cuGraphInstantiateWithParams(
    out: Out<CUgraphExec>,
    graph: CUgraph,
    params: InOut<CudaGraphInstantiateParams>,
) -> CUresult {
    const SUCCESS: u32 = 0;
    const ERROR: u32 = 1;
    const INVALID_STRUCTURE: u32 = 2;
    call(|| {
        out.require()?;
        let mut asked = *params.read()?;
        let made = instantiate(graph, asked.flags);
        let cycle = with(|store| Ok(store.graphs.graph(graph).ok().and_then(|g| g.cycle())))?;
        let conditions = with(|store| Ok(store.graphs.conditions_problem(graph)))?;
        (asked.error_node, asked.result) = match (&made, cycle, conditions) {
            (Ok(_), ..) => (0, SUCCESS),
            (Err(_), Some(node), _) => (node, INVALID_STRUCTURE),
            (Err(CUDA_ERROR_INVALID_VALUE), None, Some((result, node))) => (node, result),
            (Err(_), None, _) => (0, ERROR),
        };
        params.put(asked)?;
        let exec = made?;
        out.put(exec)?;
        if asked.flags & UPLOAD != 0 { upload(exec, asked.upload_stream) } else { Ok(()) }
    })
}

pub fn cuGraphExecDestroy(exec: CUgraphExec) -> CUresult {
    call(|| with(|store| store.execs.destroy(&mut store.graphs, exec)))
}

pub fn cuGraphExecGetFlags(exec: CUgraphExec, flags: Out<u64>) -> CUresult {
    call(|| flags.put(with(|store| Ok(store.execs.get_mut(exec)?.flags & AUTO_FREE))?))
}

fn upload(exec: CUgraphExec, stream: CUstream) -> Result<()> {
    hook::not_capturable(stream)?;
    driver()?.stream(stream)?;
    let made = with(|store| Ok(store.execs.get_mut(exec)?.made))?;
    driver()?.upload(made, stream)
}

pub fn cuGraphUpload(exec: CUgraphExec, stream: CUstream) -> CUresult {
    call(|| upload(exec, stream))
}

pub fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) -> CUresult {
    call(|| {
        hook::not_capturable(stream)?;
        let driver = driver()?;
        driver.stream(stream)?;
        let (made, flat, frees) = with(|store| {
            let exec = store.execs.get_mut(exec)?;
            let (made, flat, automatic) = (exec.made, exec.flat.clone(), exec.flags & AUTO_FREE != 0);
            let (allocates, frees) = (exec.allocates.clone(), exec.frees.clone());
            store.graphs.memory.launch(&allocates, &frees, automatic)?;
            Ok((made, flat, frees))
        })?;
        let launched = driver.launch(made, &flat, stream);
        if !frees.is_empty() {
            // Behind the launch, which still uses it: the driver frees in the order of what it was asked for.
            with(|store| {
                frees.iter().for_each(|address| store.graphs.memory.drop_unused(*address));
                Ok(())
            })?;
        }
        launched
    })
}

/// Has the driver take up a change, and then the executable graph.
fn apply(exec: CUgraphExec, change: impl FnOnce(&mut Store) -> Result<(Flat, Vec<usize>)>) -> Result<()> {
    with(|store| {
        let (flat, changed) = change(store)?;
        let exec = store.execs.get_mut(exec)?;
        if !changed.is_empty() {
            driver()?.update(exec.made, &flat, &changed)?;
            exec.flat = std::sync::Arc::new(flat);
        }
        Ok(())
    })
}

/// Changes the step of one node.
fn change(exec: CUgraphExec, node: CUgraphNode, change: impl FnOnce(&mut Step) -> Result<()>) -> Result<()> {
    let driver = driver()?;
    with(|store| store.execs.change(exec, node, change, |made, flat, place| driver.update(made, flat, &[place])))
}

/// Gives a node of an executable graph another task of its kind.
fn set(exec: CUgraphExec, node: CUgraphNode, task: impl FnOnce() -> Result<Task>) -> CUresult {
    call(|| {
        with(|store| store.execs.step(exec, node).map(drop))?;
        let mut task = task()?;
        change(exec, node, |step| {
            ensure(allowed(&step.task, &task), CUDA_ERROR_INVALID_VALUE)?;
            if let (Task::Kernel(old), Task::Kernel(new)) = (&step.task, &mut task) {
                new.attributes.clone_from(&old.attributes);
            }
            step.task = task;
            Ok(())
        })
    })
}

pub fn cuGraphExecKernelNodeSetParams_v2(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: In<CudaKernelNodeParams>,
) -> CUresult {
    set(exec, node, || kernel_task(params.read()?))
}

pub fn cuGraphExecKernelNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: In<CudaKernelNodeParamsV1>,
) -> CUresult {
    set(exec, node, || kernel_task_v1(params))
}

pub fn cuGraphExecMemcpyNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: In<CudaMemcpy3d>,
    context: CUcontext,
) -> CUresult {
    set(exec, node, || copy_task(*params.read()?, context))
}

pub fn cuGraphExecMemsetNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: In<CudaMemsetNodeParams>,
    context: CUcontext,
) -> CUresult {
    set(exec, node, || fill_task(*params.read()?, context))
}

pub fn cuGraphExecHostNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: In<CudaHostNodeParams>) -> CUresult {
    set(exec, node, || host_task(*params.read()?))
}

pub fn cuGraphExecEventRecordNodeSetEvent(exec: CUgraphExec, node: CUgraphNode, event: CUevent) -> CUresult {
    set(exec, node, || params::event(event).map(Task::Record))
}

pub fn cuGraphExecEventWaitNodeSetEvent(exec: CUgraphExec, node: CUgraphNode, event: CUevent) -> CUresult {
    set(exec, node, || params::event(event).map(Task::Wait))
}

pub fn cuGraphExecBatchMemOpNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: In<CudaBatchMemOpNodeParams>,
) -> CUresult {
    set(exec, node, || words_task(params.read()?))
}

pub fn cuGraphExecNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: In<CUgraphNodeParams>) -> CUresult {
    set(exec, node, || task_of(params.read()?))
}

pub fn cuGraphExecChildGraphNodeSetParams(exec: CUgraphExec, node: CUgraphNode, child: CUgraph) -> CUresult {
    call(|| {
        apply(exec, |store| {
            let updated = store.execs.updated_child(&store.graphs, exec, node, child)?;
            updated.map_err(|_| CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
        })
    })
}

pub fn cuGraphNodeGetEnabled(exec: CUgraphExec, node: CUgraphNode, out: Out<u32>) -> CUresult {
    call(|| {
        let enabled = with(|store| {
            let step = store.execs.step(exec, node)?;
            ensure(can_be_disabled(&step.task), CUDA_ERROR_INVALID_VALUE)?;
            Ok(u32::from(step.enabled))
        })?;
        out.put(enabled)
    })
}

fn can_be_disabled(task: &Task) -> bool {
    matches!(task, Task::Kernel(_) | Task::Copy(_) | Task::Fill(_))
}

pub fn cuGraphNodeSetEnabled(exec: CUgraphExec, node: CUgraphNode, enabled: u32) -> CUresult {
    call(|| {
        change(exec, node, |step| {
            ensure(can_be_disabled(&step.task), CUDA_ERROR_INVALID_VALUE)?;
            step.enabled = enabled != 0;
            Ok(())
        })
    })
}

/// The outcome of an update; where the update was refused, nothing has changed.
fn update(exec: CUgraphExec, graph: CUgraph) -> Result<Option<Refusal>> {
    let mut refusal = None;
    let applied = apply(exec, |store| {
        let updated = store.execs.updated(&store.graphs, exec, graph)?;
        updated.map_err(|refused| {
            refusal = Some(refused);
            CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
        })
    });
    match (refusal, applied) {
        (Some(refusal), _) => Ok(Some(refusal)),
        (None, applied) => applied.map(|()| None),
    }
}

pub fn cuGraphExecUpdate_v2(exec: CUgraphExec, graph: CUgraph, info: Out<CUgraphExecUpdateResultInfo>) -> CUresult {
    call(|| {
        let refusal = update(exec, graph)?;
        let Refusal { result, node, from } = refusal.unwrap_or(Refusal { result: 0, node: 0, from: 0 });
        info.put_if(CUgraphExecUpdateResultInfo { result, error_node: node, error_from_node: from });
        ensure(refusal.is_none(), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
    })
}

/// The first form knows no other reason than the graph's shape (driver 580 answers so).
pub fn cuGraphExecUpdate(
    exec: CUgraphExec,
    graph: CUgraph,
    error_node: Out<CUgraphNode>,
    result: Out<u32>,
) -> CUresult {
    call(|| {
        let refusal = update(exec, graph)?;
        let Refusal { result: code, node, .. } = refusal.unwrap_or(Refusal { result: 0, node: 0, from: 0 });
        error_node.put_if(node);
        result.put_if(if code == TYPE_CHANGED { TOPOLOGY_CHANGED } else { code });
        ensure(refusal.is_none(), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
    })
}

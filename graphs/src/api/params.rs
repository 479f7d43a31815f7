//! Conversion of nodes' tasks from and to the structures of `cuda.h`.

use std::ffi::c_void;

use rekindle_cuda_abi::arguments::{In, NodeParams, Passed};
use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::driver::driver;
use crate::task::{Copy, Fill, Host, Kernel, Task, Words};

/// `CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE`.
pub(super) const DEVICE_UPDATABLE: u32 = 13;

/// Whether nodes can have a launch attribute.
pub(super) fn is_node_attribute(attribute: u32) -> bool {
    matches!(attribute, 1 | 2 | 4 | 5 | 8 | 9 | 10 | DEVICE_UPDATABLE | 14)
}

/// The value of an attribute that has not been set: the scheduling policy is the default one, the memory domains are 0 and 1.
pub(super) fn default_attribute(attribute: u32) -> CUlaunchAttributeValue {
    let word = match attribute {
        5 => 1,
        9 => 0x100,
        _ => 0,
    };
    CUlaunchAttributeValue([word, 0, 0, 0, 0, 0, 0, 0])
}

/// A context, or the current one for 0.
fn context_or_current(context: CUcontext) -> Result<CUcontext> {
    let current = driver()?.current()?;
    let context = if context == 0 { current } else { context };
    ensure(context != 0, CUDA_ERROR_INVALID_CONTEXT)?;
    driver()?.device(context)?;
    Ok(context)
}

pub(super) fn kernel_task(params: Passed<CudaKernelNodeParams>) -> Result<Task> {
    kernel_of(params.v1(), params.kern, params.context)
}

pub(super) fn kernel_task_v1(params: In<CudaKernelNodeParamsV1>) -> Result<Task> {
    kernel_of(params.read()?, 0, 0)
}

fn kernel_of(p: Passed<CudaKernelNodeParamsV1>, kern: CUkernel, context: CUcontext) -> Result<Task> {
    let driver = driver()?;
    let (function, by_kernel) = if p.func == 0 { (kern, true) } else { (p.func, false) };
    ensure(function != 0, CUDA_ERROR_INVALID_HANDLE)?;
    let facts = driver.kernel(function)?;
    let context = match facts.context {
        0 => context_or_current(if by_kernel { context } else { 0 })?,
        context => context,
    };
    // SAFETY: the layout is that of the kernel which these parameters name.
    let parameters = unsafe { p.parameters(&facts.layout) }?;
    let kernel = Kernel {
        function,
        by_kernel,
        context,
        grid: p.grid,
        block: p.block,
        shared_bytes: p.shared_bytes,
        layout: facts.layout,
        parameters,
        ..Default::default()
    };
    driver.check_kernel(&kernel)?;
    Ok(Task::Kernel(kernel))
}

/// A kernel's parameters as they are handed out: pointers into the node.
pub(super) fn shown(kernel: &mut Kernel) -> CudaKernelNodeParams {
    let base = kernel.parameters.as_ptr() as u64;
    kernel.pointers = kernel.layout.iter().map(|(offset, _)| base + u64::from(*offset)).collect();
    let (func, kern) = if kernel.by_kernel { (0, kernel.function) } else { (kernel.function, 0) };
    let none = kernel.pointers.is_empty();
    let pointers = if none { std::ptr::null_mut() } else { kernel.pointers.as_mut_ptr().cast::<*mut c_void>() };
    let v1 = CudaKernelNodeParamsV1 {
        func,
        grid: kernel.grid,
        block: kernel.block,
        shared_bytes: kernel.shared_bytes,
        params: pointers,
        extra: std::ptr::null_mut(),
    };
    CudaKernelNodeParams { v1, kern, context: kernel.context }
}

pub(super) fn copy_task(params: CudaMemcpy3d, context: CUcontext) -> Result<Task> {
    let copy = Copy { copy: params, context: context_or_current(context)? };
    ensure(![copy.copy.width, copy.copy.height, copy.copy.depth].contains(&0), CUDA_ERROR_INVALID_VALUE)?;
    driver()?.check_copy(&copy)?;
    Ok(Task::Copy(copy))
}

pub(super) fn fill_task(params: CudaMemsetNodeParams, context: CUcontext) -> Result<Task> {
    let fill = Fill { fill: params, context: context_or_current(context)? };
    let p = &fill.fill;
    let good = matches!(p.element, 1 | 2 | 4) && p.width > 0 && p.height > 0 && p.dst != 0;
    ensure(good && p.dst.is_multiple_of(u64::from(p.element)), CUDA_ERROR_INVALID_VALUE)?;
    driver()?.check_fill(&fill)?;
    Ok(Task::Fill(fill))
}

pub(super) fn host_task(params: CudaHostNodeParams) -> Result<Task> {
    let CudaHostNodeParams { function, data } = params;
    ensure(function != 0, CUDA_ERROR_INVALID_VALUE)?;
    Ok(Task::Host(Host { function, data }))
}

pub(super) fn event(event: CUevent) -> Result<CUevent> {
    ensure(event != 0, CUDA_ERROR_INVALID_VALUE)?;
    driver()?.event(event)?;
    Ok(event)
}

pub(super) fn words_task(params: Passed<CudaBatchMemOpNodeParams>) -> Result<Task> {
    const MOST: usize = 256;
    ensure(params.count as usize <= MOST && params.flags == 0, CUDA_ERROR_INVALID_VALUE)?;
    let operations = params.operations()?;
    let words = Words { context: context_or_current(params.context)?, operations, flags: params.flags };
    driver()?.check_words(&words)?;
    Ok(Task::Words(words))
}

/// The task that `CUgraphNodeParams` describe, for all types but children and memory.
pub(super) fn task_of(params: Passed<CUgraphNodeParams>) -> Result<Task> {
    ensure(params.reserved == [0; 3] && params.reserved_at_end == 0, CUDA_ERROR_INVALID_VALUE)?;
    match params.node() {
        NodeParams::Kernel(params) => kernel_task(params),
        NodeParams::Memcpy(params) => {
            ensure(params.flags == 0 && params.reserved == 0, CUDA_ERROR_INVALID_VALUE)?;
            copy_task(params.copy, params.context)
        }
        NodeParams::Memset(params, context) => fill_task(*params, context),
        NodeParams::Host(params) => host_task(*params),
        NodeParams::Empty => Ok(Task::Empty),
        NodeParams::Wait(it) => event(it).map(Task::Wait),
        NodeParams::Record(it) => event(it).map(Task::Record),
        NodeParams::BatchMemOp(params) => words_task(params),
        // Neither a node's nor that of an executable graph can change: driver 580 answers so.
        NodeParams::Conditional | NodeParams::Unsupported => Err(CUDA_ERROR_NOT_SUPPORTED),
        NodeParams::Child(_) | NodeParams::Allocate | NodeParams::Free(_) | NodeParams::Unknown => {
            Err(CUDA_ERROR_INVALID_VALUE)
        }
    }
}

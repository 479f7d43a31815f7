//! What nodes do, from and to the structures of `cuda.h`.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;

use super::{ensure, read, slice};
use crate::Result;
use crate::driver::driver;
use crate::task::{Copy, Fill, Host, Kernel, Task, Words, gather};

/// `CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE`.
pub(super) const DEVICE_UPDATABLE: u32 = 13;

/// Whether nodes can have a launch attribute.
pub(super) fn is_node_attribute(attribute: u32) -> bool {
    matches!(attribute, 1 | 2 | 4 | 5 | 8 | 9 | 10 | DEVICE_UPDATABLE | 14)
}

/// What an attribute is that has not been set: the scheduling policy is the default one, the memory domains are 0 and 1.
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

pub(super) unsafe fn kernel_task(params: &CudaKernelNodeParams) -> Result<Task> {
    let driver = driver()?;
    let p = params.v1;
    let (function, by_kernel) = if p.func == 0 { (params.kern, true) } else { (p.func, false) };
    ensure(function != 0, CUDA_ERROR_INVALID_HANDLE)?;
    let facts = driver.kernel(function)?;
    let context = match facts.context {
        0 => context_or_current(if by_kernel { params.context } else { 0 })?,
        context => context,
    };
    let parameters = unsafe { gather(&facts.layout, p.params, p.extra) }?;
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

pub(super) unsafe fn kernel_task_v1(params: *const CudaKernelNodeParamsV1) -> Result<Task> {
    let v1 = unsafe { read(params) }?;
    unsafe { kernel_task(&CudaKernelNodeParams { v1, kern: 0, context: 0 }) }
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

pub(super) unsafe fn copy_task(params: *const CudaMemcpy3d, context: CUcontext) -> Result<Task> {
    let copy = Copy { copy: unsafe { read(params) }?, context: context_or_current(context)? };
    ensure(![copy.copy.width, copy.copy.height, copy.copy.depth].contains(&0), CUDA_ERROR_INVALID_VALUE)?;
    driver()?.check_copy(&copy)?;
    Ok(Task::Copy(copy))
}

pub(super) unsafe fn fill_task(params: *const CudaMemsetNodeParams, context: CUcontext) -> Result<Task> {
    let fill = Fill { fill: unsafe { read(params) }?, context: context_or_current(context)? };
    let p = &fill.fill;
    let good = matches!(p.element, 1 | 2 | 4) && p.width > 0 && p.height > 0 && p.dst != 0;
    ensure(good && p.dst.is_multiple_of(u64::from(p.element)), CUDA_ERROR_INVALID_VALUE)?;
    driver()?.check_fill(&fill)?;
    Ok(Task::Fill(fill))
}

pub(super) unsafe fn host_task(params: *const CudaHostNodeParams) -> Result<Task> {
    let CudaHostNodeParams { function, data } = unsafe { read(params) }?;
    ensure(function != 0, CUDA_ERROR_INVALID_VALUE)?;
    Ok(Task::Host(Host { function, data }))
}

pub(super) fn event(event: CUevent) -> Result<CUevent> {
    ensure(event != 0, CUDA_ERROR_INVALID_VALUE)?;
    driver()?.event(event)?;
    Ok(event)
}

pub(super) unsafe fn words_task(params: &CudaBatchMemOpNodeParams) -> Result<Task> {
    const MOST: usize = 256;
    let count = params.count as usize;
    ensure(count <= MOST && params.flags == 0, CUDA_ERROR_INVALID_VALUE)?;
    let operations = unsafe { slice(params.operations.cast_const(), count) }?.to_vec();
    let words = Words { context: context_or_current(params.context)?, operations, flags: params.flags };
    driver()?.check_words(&words)?;
    Ok(Task::Words(words))
}

/// What `CUgraphNodeParams` say, but for children and memory.
pub(super) unsafe fn task_of(params: &CUgraphNodeParams) -> Result<Task> {
    ensure(params.reserved == [0; 3] && params.reserved_at_end == 0, CUDA_ERROR_INVALID_VALUE)?;
    let words = params.words.as_ptr();
    unsafe {
        match params.kind {
            0 => kernel_task(&words.cast::<CudaKernelNodeParams>().read_unaligned()),
            1 => {
                let params = words.cast::<CudaMemcpyNodeParams>().read_unaligned();
                ensure(params.flags == 0 && params.reserved == 0, CUDA_ERROR_INVALID_VALUE)?;
                copy_task(&params.copy, params.context)
            }
            2 => {
                const CONTEXT: usize = size_of::<CudaMemsetNodeParams>() / 8;
                fill_task(words.cast(), params.words[CONTEXT])
            }
            3 => host_task(words.cast()),
            5 => Ok(Task::Empty),
            6 => event(params.words[0]).map(Task::Wait),
            7 => event(params.words[0]).map(Task::Record),
            12 => words_task(&words.cast::<CudaBatchMemOpNodeParams>().read_unaligned()),
            // External semaphores and conditions.
            8 | 9 | 13 => Err(CUDA_ERROR_NOT_SUPPORTED),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}

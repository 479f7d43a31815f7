//! What graphs need of the other calls: checks without a stream, and the same commands for a stream.

use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::Ordering::Relaxed;

use rekindle_cuda_abi::launch::extra;
use rekindle_cuda_abi::types::*;
use rekindle_graphs::Kernel;
use rekindle_wire::boxes::End;
use rekindle_wire::command::{Kind, Launch, MemOp};

pub(crate) use super::boxes::{copy, host_box, is_on_device};
pub(crate) use super::callback::enqueue;
pub(crate) use super::library::send_parts;
pub(crate) use super::memory::reserve_window;
pub(crate) use super::stream::named as stream;
use super::{boxes, check, launch as launches, memset, pinned as pages, stream_memory};
use crate::call::remote;
use crate::state::client::{self, Client};

/// What the driver says at once of a launch: sizes against the device's limits and the function's own.
pub(crate) fn check_kernel(kernel: &Kernel) -> Result<(), CUresult> {
    const MAX_THREADS: u32 = 0;
    const MAX_DYNAMIC_SHARED: u32 = 8;
    // `CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK`, `..._MAX_BLOCK_DIM_X`, `..._MAX_GRID_DIM_X`.
    const BLOCK_THREADS: usize = 1;
    const BLOCK: usize = 2;
    const GRID: usize = 5;
    let client = client::get()?;
    let known = client.functions.get(kernel.function).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    let mut hasher = DefaultHasher::new();
    (kernel.block, kernel.shared_bytes).hash(&mut hasher);
    let digest = hasher.finish() | 1;
    let device = client.contexts.get(kernel.context).ok_or(CUDA_ERROR_INVALID_CONTEXT)?.device;
    let limits = client.devices.get(device).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    let limit = |n: usize| limits.attributes.get(n).map_or(0, |a| a.1 as u32);
    let within = |sizes: [u32; 3], first: usize| (0..3).all(|i| (1..=limit(first + i)).contains(&sizes[i]));
    let threads = kernel.block.iter().map(|n| u64::from(*n)).product::<u64>();
    if !within(kernel.block, BLOCK) || !within(kernel.grid, GRID) || threads > u64::from(limit(BLOCK_THREADS)) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if known.checked.load(Relaxed) == digest {
        return Ok(());
    }
    let attribute = |which| function_attribute(client, kernel.function, device, which).map(|v| v.max(0) as u64);
    if threads > attribute(MAX_THREADS)? || u64::from(kernel.shared_bytes) > attribute(MAX_DYNAMIC_SHARED)? {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    known.checked.store(digest, Relaxed);
    Ok(())
}

/// An attribute of a function, or of a kernel on one of the worker's devices: of that the driver does not say it by
/// `cuFuncGetAttribute`.
pub(crate) fn function_attribute(client: &Client, function: u64, device: usize, which: u32) -> Result<i32, CUresult> {
    let mut value = 0;
    // SAFETY: the out parameter is a local.
    check(unsafe {
        if Kind::Kernel.owns(function) {
            remote::cuKernelGetAttribute(&raw mut value, which, function, client.devices.ordinal(device))
        } else {
            remote::cuFuncGetAttribute(&raw mut value, which, function)
        }
    })?;
    Ok(value)
}

/// Both ends of a copy as the worker reaches them, `None` where it does not.
pub(crate) fn ends(c: &CudaMemcpy3d) -> Result<Option<(End, End)>, CUresult> {
    Ok(boxes::end_of(&c.dst, c)?.zip(boxes::end_of(&c.src, c)?))
}

fn operations(list: &[CUstreamBatchMemOpParams]) -> Vec<MemOp> {
    list.iter().map(stream_memory::operation).collect()
}

/// What the driver says at once of operations on words.
pub(crate) fn check_words(list: &[CUstreamBatchMemOpParams]) -> Result<(), CUresult> {
    operations(list).iter().try_for_each(stream_memory::judge)
}

/// Enqueues operations on words.
pub(crate) fn words(stream: CUstream, list: &[CUstreamBatchMemOpParams]) -> Result<(), CUresult> {
    stream_memory::enqueue(stream, &operations(list))
}

/// Launches a kernel whose parameters have been gathered.
pub(crate) fn launch(what: Launch<'_>) -> Result<(), CUresult> {
    let mut size = 0;
    let mut extra = extra(what.parameters, &mut size);
    // SAFETY: parameters of the function's layout, which live through the call.
    unsafe {
        launches::launch(
            Launch { parameters: &[], ..what },
            std::ptr::null_mut(),
            extra.as_mut_ptr(),
            launches::By::Parts,
        )
    }
}

/// Enqueues a memset.
pub(crate) fn fill(p: &CudaMemsetNodeParams, stream: CUstream) -> Result<(), CUresult> {
    let CudaMemsetNodeParams { dst, pitch, value, element, width, height } = *p;
    // SAFETY: no pointers of the caller's.
    check(unsafe {
        match (element, height) {
            (1, 0 | 1) => memset::cuMemsetD8Async(dst, value as u8, width, stream),
            (2, 0 | 1) => memset::cuMemsetD16Async(dst, value as u16, width, stream),
            (4, 0 | 1) => memset::cuMemsetD32Async(dst, value, width, stream),
            (1, _) => memset::cuMemsetD2D8Async(dst, pitch, value as u8, width, height, stream),
            (2, _) => memset::cuMemsetD2D16Async(dst, pitch, value as u16, width, height, stream),
            (4, _) => memset::cuMemsetD2D32Async(dst, pitch, value, width, height, stream),
            _ => CUDA_ERROR_INVALID_VALUE,
        }
    })
}

/// Pinned memory of this library's own.
pub(crate) fn pinned(bytes: usize) -> Result<*mut c_void, CUresult> {
    let mut memory = std::ptr::null_mut();
    // SAFETY: the out parameter is a local.
    check(unsafe { pages::cuMemHostAlloc(&raw mut memory, bytes, 0) })?;
    Ok(memory)
}

/// Gives it back.
pub(crate) fn unpin(memory: *mut c_void) {
    // SAFETY: what `pinned` gave, and not used any more.
    unsafe { pages::cuMemFreeHost(memory) };
}

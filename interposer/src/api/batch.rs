//! Copies in batches. The driver promises no order within a batch; here the copies follow each other in their stream.

use rekindle_cuda_abi::batch::{self, SOURCE_DURING_CALL, array, attributes_of};
use rekindle_cuda_abi::types::*;

use super::{check, code, put_if, stream, transfer};
use crate::operations::boxes;
use crate::process::calling_thread::named_stream;
use crate::process::log;
use crate::state::client;

/// Runs the copies of a batch. Where one fails, `fail_index` gets its place.
///
/// # Safety
/// `fail_index` is null or writable.
unsafe fn each(
    count: usize,
    on: CUstream,
    fail_index: *mut usize,
    one: impl FnMut(usize) -> Result<bool, CUresult>,
) -> Result<(), CUresult> {
    client::get()?.contexts.current()?;
    if rekindle_graphs::hook::captures(on) {
        return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    // SAFETY: the caller's promise. So far no copy has failed.
    unsafe { put_if(fail_index, usize::MAX) };
    if count == 0 || named_stream(on) == CU_STREAM_LEGACY {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    let wait = batch::each(count, one, |place| unsafe { put_if(fail_index, place) })?;
    // SAFETY: no pointers.
    if wait { check(unsafe { stream::cuStreamSynchronize(on) }) } else { Ok(()) }
}

pub(crate) unsafe fn cuMemcpyBatchAsync(
    targets: *mut CUdeviceptr,
    sources: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    indices: *mut usize,
    attribute_count: usize,
    fail_index: *mut usize,
    on: CUstream,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    let arguments = unsafe {
        array(targets, count).and_then(|targets| {
            let (sources, sizes) = (array(sources, count)?, array(sizes, count)?);
            let of = attributes_of(count, array(attributes, attribute_count)?, array(indices, attribute_count)?)?;
            Ok((targets, sources, sizes, of))
        })
    };
    code(arguments.and_then(|(targets, sources, sizes, of)| {
        // SAFETY: the caller's promise by cuda.h.
        unsafe {
            each(count, on, fail_index, |i| {
                check(transfer::cuMemcpyAsync(targets[i], sources[i], sizes[i], on))?;
                Ok(of(i).order == SOURCE_DURING_CALL)
            })
        }
    }))
}

pub(crate) unsafe fn cuMemcpyBatchAsync_v2(
    targets: *mut CUdeviceptr,
    sources: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    indices: *mut usize,
    attribute_count: usize,
    on: CUstream,
) -> CUresult {
    let nowhere = std::ptr::null_mut();
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuMemcpyBatchAsync(targets, sources, sizes, count, attributes, indices, attribute_count, nowhere, on) }
}

pub(crate) unsafe fn cuMemcpy3DBatchAsync(
    count: usize,
    operations: *mut CudaMemcpy3dBatchOp,
    fail_index: *mut usize,
    flags: u64,
    on: CUstream,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    let operations = unsafe { array(operations, count) };
    code(operations.and_then(|operations| {
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let element = |it| {
            let desc = client::get()?.arrays.get(it)?.desc;
            if desc.edge() > 1 {
                // cuda.h does not say whether sizes count blocks or texels.
                log::refused("cuMemcpy3DBatchAsync of block-compressed arrays");
                return Err(CUDA_ERROR_NOT_SUPPORTED);
            }
            desc.element().ok_or(CUDA_ERROR_INVALID_VALUE)
        };
        // SAFETY: the caller's promise by cuda.h.
        unsafe {
            each(count, on, fail_index, |i| {
                boxes::copy(&operations[i].copy(element)?, on, false)?;
                Ok(operations[i].order == SOURCE_DURING_CALL)
            })
        }
    }))
}

pub(crate) unsafe fn cuMemcpy3DBatchAsync_v2(
    count: usize,
    operations: *mut CudaMemcpy3dBatchOp,
    flags: u64,
    on: CUstream,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuMemcpy3DBatchAsync(count, operations, std::ptr::null_mut(), flags, on) }
}

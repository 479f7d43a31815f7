//! Copies in batches. `cuda.h` leaves their order open; this library does them one after the other in their stream.

use rekindle_cuda_abi::arguments::Out;
use rekindle_cuda_abi::batch::{self, SOURCE_DURING_CALL, array, attributes_of};
use rekindle_cuda_abi::types::{
    CU_STREAM_LEGACY, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    CUdeviceptr, CUmemcpyAttributes, CUresult, CUstream, CudaMemcpy3dBatchOp,
};

use super::{boxes, cuMemcpyAsync};
use crate::array::Array;
use crate::status::{Result, check, ensure, status};
use crate::{current, handles};

/// Runs the copies of a batch. If a copy fails, `fail_index` gets its place.
fn each(count: usize, on: CUstream, fail_index: Out<usize>, one: impl FnMut(usize) -> Result<bool>) -> Result<()> {
    if rekindle_graphs::hook::captures(on) {
        return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    let stream = current::stream(on)?;
    fail_index.put_if(usize::MAX);
    ensure(count > 0 && stream.handle != CU_STREAM_LEGACY, CUDA_ERROR_INVALID_VALUE)?;
    let wait = batch::each(count, one, |place| fail_index.put_if(place))?;
    if wait { stream.synchronize() } else { Ok(()) }
}

pub unsafe fn cuMemcpyBatchAsync(
    targets: *mut CUdeviceptr,
    sources: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    indices: *mut usize,
    attribute_count: usize,
    fail_index: Out<usize>,
    on: CUstream,
) -> CUresult {
    // SAFETY: the caller passes arrays of so many elements, which stay until the call returns.
    let arguments = unsafe {
        array(targets, count).and_then(|targets| {
            let (sources, sizes) = (array(sources, count)?, array(sizes, count)?);
            let of = attributes_of(count, array(attributes, attribute_count)?, array(indices, attribute_count)?)?;
            Ok((targets, sources, sizes, of))
        })
    };
    status(|| {
        arguments.and_then(|(targets, sources, sizes, of)| {
            each(count, on, fail_index, |i| {
                check(cuMemcpyAsync(targets[i], sources[i], sizes[i], on))?;
                Ok(of(i).order == SOURCE_DURING_CALL)
            })
        })
    })
}

pub unsafe fn cuMemcpyBatchAsync_v2(
    targets: *mut CUdeviceptr,
    sources: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    indices: *mut usize,
    attribute_count: usize,
    on: CUstream,
) -> CUresult {
    let nowhere = Out::null();
    // SAFETY: the arguments of this call.
    unsafe { cuMemcpyBatchAsync(targets, sources, sizes, count, attributes, indices, attribute_count, nowhere, on) }
}

pub unsafe fn cuMemcpy3DBatchAsync(
    count: usize,
    operations: *mut CudaMemcpy3dBatchOp,
    fail_index: Out<usize>,
    flags: u64,
    on: CUstream,
) -> CUresult {
    // SAFETY: as for `cuMemcpyBatchAsync`.
    let operations = unsafe { array(operations, count) };
    status(|| {
        operations.and_then(|operations| {
            if flags != 0 {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            let element = |it| {
                let desc = handles::get::<Array>(it)?.desc;
                // cuda.h does not say whether sizes of a block-compressed array count blocks or texels.
                ensure(desc.edge() == 1, CUDA_ERROR_NOT_SUPPORTED)?;
                desc.element().ok_or(CUDA_ERROR_INVALID_VALUE)
            };
            each(count, on, fail_index, |i| {
                check(boxes::copy_box(&operations[i].copy(element)?, on, false))?;
                Ok(operations[i].order == SOURCE_DURING_CALL)
            })
        })
    })
}

pub unsafe fn cuMemcpy3DBatchAsync_v2(
    count: usize,
    operations: *mut CudaMemcpy3dBatchOp,
    flags: u64,
    on: CUstream,
) -> CUresult {
    // SAFETY: the arguments of this call.
    unsafe { cuMemcpy3DBatchAsync(count, operations, Out::null(), flags, on) }
}

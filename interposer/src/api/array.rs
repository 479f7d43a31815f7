//! Arrays, and copies of bytes in them. What an array is like is known here; the worker has it.

use std::ffi::c_void;

use rekindle_cuda_abi::raw::read;
use rekindle_cuda_abi::types::{CudaMemcpy3dSide as Side, *};
use rekindle_wire::command::{ARRAY_CREATE, ARRAY_DESTROY, ArrayCreate, ArrayDestroy, Kind};

use super::context::in_first_form;
use super::{check, code, put};
use crate::call::Call;
use crate::operations::boxes;
use crate::process::log;
use crate::state::arrays::Array;
use crate::state::client::{self, Client};

/// The size that a descriptor says.
pub(super) fn size_of(d: &CudaArray3dDescriptor) -> [u64; 3] {
    [d.width, d.height, d.depth].map(|n| n as u64)
}

/// Refuses what cannot be saved: arrays without memory of their own, and formats with several planes.
pub(super) fn ensure_supported(function: &'static str, d: &CudaArray3dDescriptor) -> Result<(), CUresult> {
    let bare = CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING;
    // Formats that say their channels are numbered from here on; below, an unknown number is the caller's mistake.
    const SPECIAL_FORMATS: u32 = 0x40;
    if d.flags & bare != 0 || d.format >= SPECIAL_FORMATS && packing(d.format).is_none() {
        log::refused(function);
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    Ok(())
}

fn create(out: *mut CUarray, desc: CudaArray3dDescriptor, function: &'static str) -> Result<(), CUresult> {
    let client = client::get()?;
    let (context, _) = client.contexts.current()?;
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    ensure_supported(function, &desc)?;
    let mut call = Call::in_context(ARRAY_CREATE)?;
    let handle = client.fresh(Kind::Array);
    let (size, format, channels, flags) = (size_of(&desc), desc.format, desc.channels, desc.flags);
    call.put(&ArrayCreate { array: handle, size, format, channels, flags });
    check(call.wait().0)?;
    client.arrays.insert(handle, Array { desc, context, level: false });
    // SAFETY: not null, so writable by cuda.h's contract.
    unsafe { put(out, handle) }
}

pub(crate) unsafe fn cuArray3DCreate_v2(out: *mut CUarray, desc: *const CudaArray3dDescriptor) -> CUresult {
    if desc.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, so readable by cuda.h's contract.
    code(create(out, unsafe { *desc }, "cuArray3DCreate_v2"))
}

pub(crate) unsafe fn cuArrayCreate_v2(out: *mut CUarray, desc: *const CudaArrayDescriptor) -> CUresult {
    if desc.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, so readable by cuda.h's contract.
    code(create(out, unsafe { *desc }.into(), "cuArrayCreate_v2"))
}

pub(crate) unsafe fn cuArrayDestroy(array: CUarray) -> CUresult {
    code(client::get().and_then(|client| {
        let known = client.arrays.get(array)?;
        if known.level {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut call = Call::new(ARRAY_DESTROY)?;
        call.put(&ArrayDestroy { array });
        client.arrays.remove(array);
        check(call.wait().0).inspect_err(|_| client.arrays.insert(array, known))
    }))
}

// The forms before CUDA 3.2, whose descriptors have sizes of 32 bits. They are for contexts that `cuCtxCreate` in its first form
// made.

pub(crate) unsafe fn cuArrayCreate(out: *mut CUarray, desc: *const CudaArrayDescriptorV1) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    let read = |()| unsafe { read(desc) };
    code(
        client::get().and_then(in_first_form).and_then(read).and_then(|desc| create(out, desc.into(), "cuArrayCreate")),
    )
}

pub(crate) unsafe fn cuArray3DCreate(out: *mut CUarray, desc: *const CudaArray3dDescriptorV1) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    let read = |()| unsafe { read(desc) };
    code(
        client::get()
            .and_then(in_first_form)
            .and_then(read)
            .and_then(|desc| create(out, desc.into(), "cuArray3DCreate")),
    )
}

pub(crate) unsafe fn cuArrayGetDescriptor(out: *mut CudaArrayDescriptorV1, array: CUarray) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(client::get().and_then(|client| unsafe { put(out, described_in_first_form(client, array)?.into()) }))
}

pub(crate) unsafe fn cuArray3DGetDescriptor(out: *mut CudaArray3dDescriptorV1, array: CUarray) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(client::get().and_then(|client| unsafe { put(out, described_in_first_form(client, array)?.into()) }))
}

fn described_in_first_form(client: &Client, array: CUarray) -> Result<CudaArray3dDescriptor, CUresult> {
    let known = client.arrays.get(array)?;
    in_first_form(client).map(|()| known.desc)
}

pub(crate) unsafe fn cuArray3DGetDescriptor_v2(out: *mut CudaArray3dDescriptor, array: CUarray) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(client::get().and_then(|client| unsafe { put(out, client.arrays.get(array)?.desc) }))
}

pub(crate) unsafe fn cuArrayGetDescriptor_v2(out: *mut CudaArrayDescriptor, array: CUarray) -> CUresult {
    code(client::get().and_then(|client| {
        let CudaArray3dDescriptor { width, height, format, channels, .. } = client.arrays.get(array)?.desc;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(out, CudaArrayDescriptor { width, height, format, channels }) }
    }))
}

/// The answer of three functions for kinds of arrays that are not supported (with several planes, sparse, without memory):
/// for any other array the driver returns this error.
fn of_another_kind(array: CUarray) -> CUresult {
    code(client::get().and_then(|client| client.arrays.get(array)).and(Err(CUDA_ERROR_INVALID_VALUE)))
}

/// As [`of_another_kind`], for functions that check for null first.
fn of_another_kind_or_null(array: CUarray) -> CUresult {
    if array == 0 { CUDA_ERROR_INVALID_VALUE } else { of_another_kind(array) }
}

pub(crate) unsafe fn cuArrayGetPlane(_plane: *mut CUarray, array: CUarray, _index: u32) -> CUresult {
    of_another_kind(array)
}

pub(crate) unsafe fn cuArrayGetSparseProperties(_properties: *mut c_void, array: CUarray) -> CUresult {
    of_another_kind_or_null(array)
}

pub(crate) unsafe fn cuArrayGetMemoryRequirements(
    _requirements: *mut CudaArrayMemoryRequirements,
    array: CUarray,
    _device: CUdevice,
) -> CUresult {
    of_another_kind_or_null(array)
}

/// # Safety
/// Host memory that a side names holds as many bytes.
unsafe fn row(dst: Side, src: Side, bytes: usize, on: CUstream, wait: bool) -> CUresult {
    let copy = CudaMemcpy3d::of_bytes(dst, src, bytes);
    // SAFETY: the caller's promise.
    code(unsafe { boxes::copy(&copy, on, wait) })
}

pub(crate) unsafe fn cuMemcpyAtoA_v2(dst: CUarray, dst_at: usize, src: CUarray, src_at: usize, n: usize) -> CUresult {
    // SAFETY: no host memory.
    unsafe { row(Side::in_array(dst, dst_at), Side::in_array(src, src_at), n, 0, true) }
}

pub(crate) unsafe fn cuMemcpyAtoD_v2(dst: CUdeviceptr, src: CUarray, at: usize, n: usize) -> CUresult {
    // SAFETY: no host memory.
    unsafe { row(Side::on_device(dst), Side::in_array(src, at), n, 0, true) }
}

pub(crate) unsafe fn cuMemcpyDtoA_v2(dst: CUarray, at: usize, src: CUdeviceptr, n: usize) -> CUresult {
    // SAFETY: no host memory.
    unsafe { row(Side::in_array(dst, at), Side::on_device(src), n, 0, true) }
}

pub(crate) unsafe fn cuMemcpyAtoH_v2(dst: *mut c_void, src: CUarray, at: usize, n: usize) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { row(Side::on_host(dst), Side::in_array(src, at), n, 0, true) }
}

pub(crate) unsafe fn cuMemcpyAtoHAsync_v2(
    dst: *mut c_void,
    src: CUarray,
    at: usize,
    n: usize,
    on: CUstream,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { row(Side::on_host(dst), Side::in_array(src, at), n, on, false) }
}

pub(crate) unsafe fn cuMemcpyHtoA_v2(dst: CUarray, at: usize, src: *const c_void, n: usize) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { row(Side::in_array(dst, at), Side::on_host(src), n, 0, true) }
}

pub(crate) unsafe fn cuMemcpyHtoAAsync_v2(
    dst: CUarray,
    at: usize,
    src: *const c_void,
    n: usize,
    on: CUstream,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { row(Side::in_array(dst, at), Side::on_host(src), n, on, false) }
}

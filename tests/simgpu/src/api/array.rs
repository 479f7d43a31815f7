//! Arrays, and copies of bytes in them.

use std::ffi::c_void;
use std::sync::Arc;

use rekindle_cuda_abi::arguments::{In, Out};
use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_VALUE, CUarray, CUdevice, CUdeviceptr, CUresult, CUstream, CudaArray3dDescriptor,
    CudaArray3dDescriptorV1, CudaArrayDescriptor, CudaArrayDescriptorV1, CudaArrayMemoryRequirements, CudaMemcpy3d,
    CudaMemcpy3dSide as Side,
};

use super::boxes;
use crate::array::{Array, give_back};
use crate::current;
use crate::handles;
use crate::status::{Result, ensure, status};

fn create(out: Out<CUarray>, desc: CudaArray3dDescriptor) -> Result<()> {
    let context = current::healthy()?;
    ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
    let array = Arc::new(Array::create(context.device, context.handle, handles::next(), desc)?);
    let handle = array.handle;
    handles::insert(handle, array);
    out.put(handle)
}

pub fn cuArray3DCreate_v2(out: Out<CUarray>, desc: In<CudaArray3dDescriptor>) -> CUresult {
    status(|| {
        let desc = desc.read()?;
        create(out, *desc)
    })
}

pub fn cuArrayCreate_v2(out: Out<CUarray>, desc: In<CudaArrayDescriptor>) -> CUresult {
    status(|| {
        let desc = desc.read()?;
        create(out, (*desc).into())
    })
}

/// A level of a mipmapped array ends with that array, not by itself.
pub fn cuArrayDestroy(array: CUarray) -> CUresult {
    status(|| {
        let array = handles::get::<Array>(array)?;
        ensure(!array.level, CUDA_ERROR_INVALID_VALUE)?;
        handles::remove(array.handle);
        if let Ok(context) = current::named(array.context) {
            context.synchronize()?;
        }
        give_back(array.base);
        Ok(())
    })
}

pub fn cuArrayCreate(out: Out<CUarray>, desc: In<CudaArrayDescriptorV1>) -> CUresult {
    status(|| current::in_first_form().and_then(|()| create(out, (*desc.read()?).into())))
}

pub fn cuArray3DCreate(out: Out<CUarray>, desc: In<CudaArray3dDescriptorV1>) -> CUresult {
    status(|| current::in_first_form().and_then(|()| create(out, (*desc.read()?).into())))
}

pub fn cuArrayGetDescriptor(out: Out<CudaArrayDescriptorV1>, array: CUarray) -> CUresult {
    status(|| out.put(described_in_first_form(array)?.into()))
}

pub fn cuArray3DGetDescriptor(out: Out<CudaArray3dDescriptorV1>, array: CUarray) -> CUresult {
    status(|| out.put(described_in_first_form(array)?.into()))
}

fn described_in_first_form(array: CUarray) -> Result<CudaArray3dDescriptor> {
    let array = handles::get::<Array>(array)?;
    current::in_first_form().map(|()| array.desc)
}

pub fn cuArray3DGetDescriptor_v2(out: Out<CudaArray3dDescriptor>, array: CUarray) -> CUresult {
    status(|| out.put(handles::get::<Array>(array)?.desc))
}

pub fn cuArrayGetDescriptor_v2(out: Out<CudaArrayDescriptor>, array: CUarray) -> CUresult {
    status(|| {
        let CudaArray3dDescriptor { width, height, format, channels, .. } = handles::get::<Array>(array)?.desc;
        out.put(CudaArrayDescriptor { width, height, format, channels })
    })
}

/// These three functions are for kinds of arrays that are not made here.
fn of_another_kind(array: CUarray) -> CUresult {
    status(|| handles::get::<Array>(array).and(Err(CUDA_ERROR_INVALID_VALUE)))
}

pub fn cuArrayGetPlane(_plane: *mut CUarray, array: CUarray, _index: u32) -> CUresult {
    of_another_kind(array)
}

pub fn cuArrayGetSparseProperties(_properties: *mut c_void, array: CUarray) -> CUresult {
    if array == 0 { CUDA_ERROR_INVALID_VALUE } else { of_another_kind(array) }
}

pub fn cuArrayGetMemoryRequirements(
    _requirements: *mut CudaArrayMemoryRequirements,
    array: CUarray,
    _device: CUdevice,
) -> CUresult {
    if array == 0 { CUDA_ERROR_INVALID_VALUE } else { of_another_kind(array) }
}

fn row(dst: Side, src: Side, bytes: usize, stream: CUstream, wait: bool) -> CUresult {
    boxes::copy_box(&CudaMemcpy3d::of_bytes(dst, src, bytes), stream, wait)
}

pub fn cuMemcpyAtoA_v2(dst: CUarray, dst_at: usize, src: CUarray, src_at: usize, n: usize) -> CUresult {
    row(Side::in_array(dst, dst_at), Side::in_array(src, src_at), n, 0, true)
}

pub fn cuMemcpyAtoD_v2(dst: CUdeviceptr, src: CUarray, at: usize, n: usize) -> CUresult {
    row(Side::on_device(dst), Side::in_array(src, at), n, 0, true)
}

pub fn cuMemcpyDtoA_v2(dst: CUarray, at: usize, src: CUdeviceptr, n: usize) -> CUresult {
    row(Side::in_array(dst, at), Side::on_device(src), n, 0, true)
}

pub fn cuMemcpyAtoH_v2(dst: *mut c_void, src: CUarray, at: usize, n: usize) -> CUresult {
    row(Side::on_host(dst), Side::in_array(src, at), n, 0, true)
}

pub fn cuMemcpyAtoHAsync_v2(dst: *mut c_void, src: CUarray, at: usize, n: usize, on: CUstream) -> CUresult {
    row(Side::on_host(dst), Side::in_array(src, at), n, on, false)
}

pub fn cuMemcpyHtoA_v2(dst: CUarray, at: usize, src: *const c_void, n: usize) -> CUresult {
    row(Side::in_array(dst, at), Side::on_host(src), n, 0, true)
}

pub fn cuMemcpyHtoAAsync_v2(dst: CUarray, at: usize, src: *const c_void, n: usize, on: CUstream) -> CUresult {
    row(Side::in_array(dst, at), Side::on_host(src), n, on, false)
}

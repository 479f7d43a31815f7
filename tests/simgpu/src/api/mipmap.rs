//! Mipmapped arrays.

use std::ffi::c_void;
use std::sync::Arc;

use rekindle_cuda_abi::arguments::{In, Out};
use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_VALUE, CUarray, CUdevice, CUmipmappedArray, CUresult, CudaArray3dDescriptor,
    CudaArrayMemoryRequirements,
};

use crate::array::{Mipmapped, give_back};
use crate::current;
use crate::handles;
use crate::status::{ensure, status};

/// If more levels are asked for than the size allows, the array has as many as the size allows.
pub fn cuMipmappedArrayCreate(out: Out<CUmipmappedArray>, desc: In<CudaArray3dDescriptor>, levels: u32) -> CUresult {
    status(|| {
        let context = current::healthy()?;
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let desc = desc.read()?;
        let mipmapped = Arc::new(Mipmapped::create(context.device, context.handle, *desc, levels.max(1))?);
        for level in &mipmapped.levels {
            handles::insert(level.handle, level.clone());
        }
        let handle = mipmapped.handle;
        handles::insert(handle, mipmapped);
        out.put(handle)
    })
}

pub fn cuMipmappedArrayGetLevel(out: Out<CUarray>, mipmapped: CUmipmappedArray, level: u32) -> CUresult {
    status(|| {
        let mipmapped = handles::get::<Mipmapped>(mipmapped)?;
        let level = mipmapped.levels.get(level as usize).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        out.put(level.handle)
    })
}

pub fn cuMipmappedArrayDestroy(mipmapped: CUmipmappedArray) -> CUresult {
    status(|| {
        let mipmapped = handles::get::<Mipmapped>(mipmapped)?;
        handles::remove(mipmapped.handle);
        mipmapped.levels.iter().for_each(|level| handles::remove(level.handle));
        if let Ok(context) = current::named(mipmapped.context) {
            context.synchronize()?;
        }
        give_back(mipmapped.base);
        Ok(())
    })
}

/// These two functions are for kinds of arrays that are not made here.
pub fn cuMipmappedArrayGetMemoryRequirements(
    _requirements: *mut CudaArrayMemoryRequirements,
    mipmapped: CUmipmappedArray,
    _device: CUdevice,
) -> CUresult {
    status(|| handles::get::<Mipmapped>(mipmapped).and(Err(CUDA_ERROR_INVALID_VALUE)))
}

pub fn cuMipmappedArrayGetSparseProperties(_properties: *mut c_void, mipmapped: CUmipmappedArray) -> CUresult {
    status(|| handles::get::<Mipmapped>(mipmapped).and(Err(CUDA_ERROR_INVALID_VALUE)))
}

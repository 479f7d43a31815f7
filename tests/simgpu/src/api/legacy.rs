//! Launches by the calls from before CUDA 4, which set the parts of a launch one by one.

use std::ffi::c_void;
use std::sync::PoisonError;

use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUfunction, CUresult, CUstream};

use crate::execution::launch::{Shape, launch};
use crate::library::function;
use crate::module::Legacy;
use crate::status::{Result, ensure, status};

/// The most bytes of parameters that a kernel takes.
const MAX_PARAMETERS: usize = 32_764;

fn set(handle: CUfunction, change: impl FnOnce(&mut Legacy) -> Result<()>) -> CUresult {
    status(|| {
        let function = function(handle)?;
        let mut legacy = function.legacy.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut legacy)
    })
}

fn set_bytes(handle: CUfunction, offset: i32, bytes: &[u8]) -> CUresult {
    set(handle, |legacy| {
        let start = usize::try_from(offset).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        let end = start + bytes.len();
        ensure(end <= MAX_PARAMETERS, CUDA_ERROR_INVALID_VALUE)?;
        if legacy.parameters.len() < end {
            legacy.parameters.resize(end, 0);
        }
        legacy.parameters[start..end].copy_from_slice(bytes);
        Ok(())
    })
}

pub unsafe fn cuFuncSetBlockShape(handle: CUfunction, x: i32, y: i32, z: i32) -> CUresult {
    set(handle, |legacy| {
        ensure([x, y, z].iter().all(|n| *n > 0), CUDA_ERROR_INVALID_VALUE)?;
        legacy.block = [x, y, z].map(i32::cast_unsigned);
        Ok(())
    })
}

pub unsafe fn cuFuncSetSharedSize(handle: CUfunction, bytes: u32) -> CUresult {
    set(handle, |legacy| {
        legacy.shared = bytes;
        Ok(())
    })
}

pub unsafe fn cuParamSetSize(handle: CUfunction, bytes: u32) -> CUresult {
    set(handle, |legacy| {
        ensure(bytes as usize <= MAX_PARAMETERS, CUDA_ERROR_INVALID_VALUE)?;
        legacy.size = bytes as usize;
        Ok(())
    })
}

pub unsafe fn cuParamSeti(handle: CUfunction, offset: i32, value: u32) -> CUresult {
    set_bytes(handle, offset, &value.to_ne_bytes())
}

pub unsafe fn cuParamSetf(handle: CUfunction, offset: i32, value: f32) -> CUresult {
    set_bytes(handle, offset, &value.to_ne_bytes())
}

pub unsafe fn cuParamSetv(handle: CUfunction, offset: i32, value: *mut c_void, bytes: u32) -> CUresult {
    if value.is_null() || bytes as usize > MAX_PARAMETERS {
        return CUDA_ERROR_INVALID_VALUE;
    }
    set_bytes(handle, offset, unsafe { std::slice::from_raw_parts(value.cast(), bytes as usize) })
}

pub unsafe fn cuLaunchGridAsync(handle: CUfunction, width: i32, height: i32, stream: CUstream) -> CUresult {
    status(|| {
        let (shape, mut parameters) = {
            let function = function(handle)?;
            let legacy = function.legacy.lock().unwrap_or_else(PoisonError::into_inner);
            let [width, height] = [width, height].map(|n| u32::try_from(n).unwrap_or(0));
            let (block, shared) = (legacy.block, legacy.shared);
            let shape = Shape { grid: [width, height, 1], block, shared, cooperative: false, cluster: [1; 3] };
            let mut parameters = legacy.parameters.clone();
            parameters.resize(legacy.size, 0);
            (shape, parameters)
        };
        let mut size = parameters.len();
        let buffer = parameters.as_mut_ptr().cast();
        let (first, second) = (std::ptr::without_provenance_mut(1), std::ptr::without_provenance_mut(2));
        let mut extra: [*mut c_void; 5] = [first, buffer, second, (&raw mut size).cast(), std::ptr::null_mut()];
        unsafe { launch(handle, shape, stream, std::ptr::null_mut(), extra.as_mut_ptr()) }
    })
}

pub unsafe fn cuLaunchGrid(handle: CUfunction, width: i32, height: i32) -> CUresult {
    unsafe { cuLaunchGridAsync(handle, width, height, 0) }
}

pub unsafe fn cuLaunch(handle: CUfunction) -> CUresult {
    unsafe { cuLaunchGridAsync(handle, 1, 1, 0) }
}

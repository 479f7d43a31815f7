//! Launches by the calls from before CUDA 4, which set the parts of a launch one by one.

use std::ffi::c_void;
use std::sync::PoisonError;

use rekindle_cuda_abi::launch::{LegacyLaunch, MAX_PARAMETERS, extra};
use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUfunction, CUresult, CUstream};

use crate::execution::launch::{Shape, launch};
use crate::library::function;
use crate::status::{Result, status};

fn set(handle: CUfunction, change: impl FnOnce(&mut LegacyLaunch) -> Result<()>) -> CUresult {
    status(|| {
        let function = function(handle)?;
        let mut legacy = function.legacy.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut legacy)
    })
}

pub fn cuFuncSetBlockShape(handle: CUfunction, x: i32, y: i32, z: i32) -> CUresult {
    set(handle, |legacy| legacy.set_block([x, y, z]))
}

pub fn cuFuncSetSharedSize(handle: CUfunction, bytes: u32) -> CUresult {
    set(handle, |legacy| {
        legacy.shared_bytes = bytes;
        Ok(())
    })
}

pub fn cuParamSetSize(handle: CUfunction, bytes: u32) -> CUresult {
    set(handle, |legacy| legacy.set_size(bytes))
}

pub fn cuParamSeti(handle: CUfunction, offset: i32, value: u32) -> CUresult {
    set(handle, |legacy| legacy.set_bytes(offset, &value.to_ne_bytes()))
}

pub fn cuParamSetf(handle: CUfunction, offset: i32, value: f32) -> CUresult {
    set(handle, |legacy| legacy.set_bytes(offset, &value.to_ne_bytes()))
}

pub unsafe fn cuParamSetv(handle: CUfunction, offset: i32, value: *mut c_void, bytes: u32) -> CUresult {
    if value.is_null() || bytes as usize > MAX_PARAMETERS {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, so that many bytes by the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts(value.cast(), bytes as usize) };
    set(handle, |legacy| legacy.set_bytes(offset, bytes))
}

pub fn cuLaunchGridAsync(handle: CUfunction, width: i32, height: i32, stream: CUstream) -> CUresult {
    status(|| {
        let (shape, parameters) = {
            let function = function(handle)?;
            let legacy = function.legacy.lock().unwrap_or_else(PoisonError::into_inner);
            let [width, height] = [width, height].map(|n| u32::try_from(n).unwrap_or(0));
            (Shape::plain([width, height, 1], legacy.block, legacy.shared_bytes), legacy.parameters())
        };
        let mut size = 0;
        let mut extra = extra(&parameters, &mut size);
        // SAFETY: `extra` describes the parameters, which outlive the call.
        unsafe { launch(handle, shape, stream, std::ptr::null_mut(), extra.as_mut_ptr()) }
    })
}

pub fn cuLaunchGrid(handle: CUfunction, width: i32, height: i32) -> CUresult {
    cuLaunchGridAsync(handle, width, height, 0)
}

pub fn cuLaunch(handle: CUfunction) -> CUresult {
    cuLaunchGridAsync(handle, 1, 1, 0)
}

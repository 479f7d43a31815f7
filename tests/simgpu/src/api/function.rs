//! Functions and their attributes.

use std::ffi::c_char;

use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUfunction, CUmodule, CUresult};

use super::library::{not_null, parameter};
use crate::handles;
use crate::library::function;
use crate::module::Function;
use crate::status::{ensure, put, status};

/// Not of a kernel, which has `cuKernelGetAttribute` (driver 580 answers so, though it takes kernels elsewhere).
pub unsafe fn cuFuncGetAttribute(value: *mut i32, attribute: u32, handle: CUfunction) -> CUresult {
    status(|| unsafe { put(value, handles::get::<Function>(handle)?.attribute(attribute)?) })
}

pub unsafe fn cuFuncSetAttribute(handle: CUfunction, attribute: u32, value: i32) -> CUresult {
    status(|| {
        let function = function(handle)?;
        function.settings.set(&function.kernel, attribute, value)
    })
}

pub unsafe fn cuFuncSetCacheConfig(handle: CUfunction, config: u32) -> CUresult {
    status(|| {
        function(handle)?;
        ensure(config <= 3, CUDA_ERROR_INVALID_VALUE)
    })
}

pub unsafe fn cuFuncSetSharedMemConfig(handle: CUfunction, config: u32) -> CUresult {
    status(|| {
        function(handle)?;
        ensure(config <= 2, CUDA_ERROR_INVALID_VALUE)
    })
}

pub unsafe fn cuFuncGetModule(module: *mut CUmodule, handle: CUfunction) -> CUresult {
    status(|| unsafe { put(module, function(not_null(handle)?)?.module) })
}

pub unsafe fn cuFuncGetName(name: *mut *const c_char, handle: CUfunction) -> CUresult {
    // The text lives as long as the module.
    status(|| unsafe { put(name, function(not_null(handle)?)?.name.as_ptr()) })
}

pub unsafe fn cuFuncGetParamInfo(handle: CUfunction, index: usize, offset: *mut usize, size: *mut usize) -> CUresult {
    status(|| unsafe { parameter(&function(not_null(handle)?)?.kernel, index, offset, size) })
}

pub unsafe fn cuFuncIsLoaded(state: *mut u32, handle: CUfunction) -> CUresult {
    status(|| unsafe { put(state, u32::from(function(handle)?.code.is_placed())) })
}

pub unsafe fn cuFuncLoad(handle: CUfunction) -> CUresult {
    status(|| function(handle)?.code.program().map(drop))
}

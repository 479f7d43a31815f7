//! Functions and their attributes.

use std::ffi::c_char;

use rekindle_cuda_abi::arguments::Out;
use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUfunction, CUmodule, CUresult};

use super::library::{not_null, parameter};
use crate::handles;
use crate::library::function;
use crate::module::Function;
use crate::status::{ensure, status};

/// A kernel is an error here, since it has `cuKernelGetAttribute` (driver 580 answers so, though it takes kernels elsewhere).
pub fn cuFuncGetAttribute(value: Out<i32>, attribute: u32, handle: CUfunction) -> CUresult {
    status(|| value.put(handles::get::<Function>(handle)?.attribute(attribute)?))
}

pub fn cuFuncSetAttribute(handle: CUfunction, attribute: u32, value: i32) -> CUresult {
    status(|| {
        let function = function(handle)?;
        function.settings.set(&function.kernel, attribute, value)
    })
}

pub fn cuFuncSetCacheConfig(handle: CUfunction, config: u32) -> CUresult {
    status(|| {
        function(handle)?;
        ensure(config <= 3, CUDA_ERROR_INVALID_VALUE)
    })
}

pub fn cuFuncSetSharedMemConfig(handle: CUfunction, config: u32) -> CUresult {
    status(|| {
        function(handle)?;
        ensure(config <= 2, CUDA_ERROR_INVALID_VALUE)
    })
}

pub fn cuFuncGetModule(module: Out<CUmodule>, handle: CUfunction) -> CUresult {
    status(|| module.put(function(not_null(handle)?)?.module))
}

pub fn cuFuncGetName(name: Out<*const c_char>, handle: CUfunction) -> CUresult {
    // The text lives as long as the module.
    status(|| name.put(function(not_null(handle)?)?.name.as_ptr()))
}

pub fn cuFuncGetParamInfo(handle: CUfunction, index: usize, offset: Out<usize>, size: Out<usize>) -> CUresult {
    status(|| parameter(&function(not_null(handle)?)?.kernel, index, offset, size))
}

pub fn cuFuncIsLoaded(state: Out<u32>, handle: CUfunction) -> CUresult {
    status(|| state.put(u32::from(function(handle)?.code.is_placed())))
}

pub fn cuFuncLoad(handle: CUfunction) -> CUresult {
    status(|| function(handle)?.code.program().map(drop))
}

//! Queries about modules, libraries, kernels and functions: their kernels, names, parameters and origin.

use std::ffi::{CString, c_char};
use std::sync::Arc;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{KERNEL_NAMES, KernelNames};

use super::library::{find_function, find_kernel, library_module};
use super::{check, code as answer, put, put_if};
use crate::call::Call;
use crate::state::client::{self, Client};
use crate::state::functions::Function;

/// The names of all kernels in a module or library.
fn kernel_names(parent: u64) -> Result<Vec<CString>, CUresult> {
    let mut names = Vec::new();
    loop {
        let mut call = Call::new(KERNEL_NAMES)?;
        call.put(&KernelNames { parent, start: names.len() as u64 });
        let (result, reply) = call.wait();
        check(result)?;
        let mut rest = reply.rest();
        let malformed = |_| CUDA_ERROR_UNKNOWN;
        let (total, count) = (rest.word().map_err(malformed)?, rest.word().map_err(malformed)?);
        for _ in 0..count {
            names.push(rest.text().map_err(malformed)?.to_owned());
        }
        if names.len() as u64 >= total || count == 0 {
            return Ok(names);
        }
    }
}

/// `cuModuleEnumerateFunctions`, all of them.
pub(crate) fn module_functions(module: CUmodule) -> Result<Vec<CUfunction>, CUresult> {
    kernel_names(module)?
        .iter()
        .map(|name| {
            let mut handle = 0;
            // SAFETY: a local, and a C string.
            unsafe { find_function(&raw mut handle, module, name.as_ptr()) }.map(|()| handle)
        })
        .collect()
}

pub(crate) unsafe fn cuModuleGetFunctionCount(count: *mut u32, module: CUmodule) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    answer(kernel_names(module).and_then(|names| unsafe { put(count, names.len() as u32) }))
}

pub(crate) unsafe fn cuModuleEnumerateFunctions(functions: *mut CUfunction, count: u32, module: CUmodule) -> CUresult {
    answer(module_functions(module).and_then(|found| {
        for (i, handle) in found.into_iter().take(count as usize).enumerate() {
            // SAFETY: cuda.h has the array hold `count` elements.
            unsafe { put(functions.wrapping_add(i), handle) }?;
        }
        Ok(())
    }))
}

pub(crate) unsafe fn cuLibraryGetKernelCount(count: *mut u32, library: CUlibrary) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    answer(kernel_names(library).and_then(|names| unsafe { put(count, names.len() as u32) }))
}

pub(crate) unsafe fn cuLibraryEnumerateKernels(kernels: *mut CUkernel, count: u32, library: CUlibrary) -> CUresult {
    answer(kernel_names(library).and_then(|names| {
        for (i, name) in names.iter().take(count as usize).enumerate() {
            // SAFETY: cuda.h has the array hold `count` elements.
            unsafe { find_kernel(kernels.wrapping_add(i), library, name.as_ptr()) }?;
        }
        Ok(())
    }))
}

/// A function or kernel. Null is a wrong value to the calls that ask with it.
fn of_handle(client: &Client, handle: u64) -> Result<Arc<Function>, CUresult> {
    let error = if handle == 0 { CUDA_ERROR_INVALID_VALUE } else { CUDA_ERROR_INVALID_HANDLE };
    client.functions.get(handle).ok_or(error)
}

/// # Safety
/// `out` is null or writable.
unsafe fn name_of(out: *mut *const c_char, handle: u64) -> CUresult {
    answer(client::get().and_then(|client| {
        let function = of_handle(client, handle)?;
        // A kernel's function has the kernel's name.
        let named = client.functions.get(function.parent).unwrap_or(function);
        // SAFETY: the caller's promise. The name lives until the function is forgotten, as in the driver.
        unsafe { put(out, named.name.as_ptr()) }
    }))
}

pub(crate) unsafe fn cuKernelGetName(name: *mut *const c_char, kernel: CUkernel) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { name_of(name, kernel) }
}

pub(crate) unsafe fn cuFuncGetName(name: *mut *const c_char, function: CUfunction) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { name_of(name, function) }
}

pub(crate) unsafe fn cuFuncGetModule(module: *mut CUmodule, function: CUfunction) -> CUresult {
    answer(client::get().and_then(|client| {
        let known = of_handle(client, function)?;
        match client.functions.get(known.parent) {
            // SAFETY: the caller's promise by cuda.h.
            None => unsafe { put(module, known.parent) },
            Some(kernel) => {
                let handle = library_module(client, kernel.parent, known.context)?;
                // SAFETY: as above.
                unsafe { put(module, handle) }
            }
        }
    }))
}

pub(crate) unsafe fn cuKernelGetLibrary(library: *mut CUlibrary, kernel: CUkernel) -> CUresult {
    answer(client::get().and_then(|client| {
        let known = client.functions.get(kernel).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(library, known.parent) }
    }))
}

/// # Safety
/// `offset` and `size` are null or writable.
unsafe fn parameter(handle: u64, index: usize, offset: *mut usize, size: *mut usize) -> CUresult {
    answer(client::get().and_then(|client| {
        let known = of_handle(client, handle)?;
        let &(o, s) = known.params.get(index).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: the caller's promise.
        unsafe {
            put(offset, o as usize)?;
            put_if(size, s as usize);
        }
        Ok(())
    }))
}

pub(crate) unsafe fn cuFuncGetParamInfo(
    function: CUfunction,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { parameter(function, index, offset, size) }
}

pub(crate) unsafe fn cuKernelGetParamInfo(
    kernel: CUkernel,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { parameter(kernel, index, offset, size) }
}

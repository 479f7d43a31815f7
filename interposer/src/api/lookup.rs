//! Finding functions and tables, and the names of errors.

use std::ffi::{CStr, c_char, c_void};

use rekindle_cuda_abi::lookup::{self, Miss};
use rekindle_cuda_abi::private;
use rekindle_cuda_abi::types::*;

use super::{code, put, put_if};
use crate::exports::{LOOKUPS, SYMBOLS};
use crate::state::client;

pub(crate) unsafe fn cuGetProcAddress_v2(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    version: i32,
    flags: u64,
    status: *mut u32,
) -> CUresult {
    if symbol.is_null() || pfn.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if version > lookup::NEWEST {
        // SAFETY: not null, so writable by the caller's promise.
        unsafe { pfn.write(std::ptr::null_mut()) };
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, so a C string by the caller's promise.
    let name = unsafe { CStr::from_ptr(symbol) }.to_str().unwrap_or_default();
    let (address, found) = match lookup::find(&LOOKUPS, name, version as u32, flags) {
        Ok(function) => (SYMBOLS[function as usize].1 as *mut c_void, 0),
        Err(miss) => (std::ptr::null_mut(), miss as u32),
    };
    // SAFETY: pfn is not null; both are writable by the caller's promise.
    unsafe {
        pfn.write(address);
        put_if(status, found);
    }
    if address.is_null() && status.is_null() { CUDA_ERROR_NOT_FOUND } else { CUDA_SUCCESS }
}

pub(crate) unsafe fn cuGetProcAddress(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    version: i32,
    flags: u64,
) -> CUresult {
    let mut status = Miss::SymbolNotFound as u32;
    // SAFETY: the caller's promise by cuda.h.
    match unsafe { cuGetProcAddress_v2(symbol, pfn, version, flags, &raw mut status) } {
        CUDA_SUCCESS if status != 0 => CUDA_ERROR_NOT_FOUND,
        result => result,
    }
}

pub(crate) unsafe fn cuGetExportTable(table: *mut *const c_void, id: *const [u8; 16]) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { private::export_table(&super::private::HOST, id, table) }
}

pub(crate) unsafe fn cuGetErrorName(error: CUresult, text: *mut *const c_char) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { error_text(error, text, true) }
}

pub(crate) unsafe fn cuGetErrorString(error: CUresult, text: *mut *const c_char) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { error_text(error, text, false) }
}

/// # Safety
/// `text` is null or writable.
unsafe fn error_text(error: CUresult, text: *mut *const c_char, name: bool) -> CUresult {
    let found = result_text(error, name);
    // SAFETY: the caller's promise.
    let put = unsafe { put(text, found.unwrap_or(std::ptr::null())) };
    code(put.and(if found.is_some() { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }))
}

/// `CU_MODULE_LAZY_LOADING`: with eager loading cuBLAS alone loads thousands of libraries at start.
const LAZY: u32 = 2;

pub(crate) unsafe fn cuModuleGetLoadingMode(mode: *mut u32) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(unsafe { put(mode, LAZY) })
}

pub(crate) unsafe fn cuProfilerInitialize(_config: *const c_char, _output: *const c_char, _mode: u32) -> CUresult {
    // The driver's answer since 12.0.
    CUDA_ERROR_NOT_SUPPORTED
}

/// There is nothing to profile in this process.
fn profiler() -> CUresult {
    code(client::get().and_then(|client| client.contexts.current().map(drop)))
}

pub(crate) unsafe fn cuProfilerStart() -> CUresult {
    profiler()
}

pub(crate) unsafe fn cuProfilerStop() -> CUresult {
    profiler()
}

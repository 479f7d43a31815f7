//! Initialisation, versions, look-up, error texts, the profiler.

use std::ffi::{c_char, c_void};

use rekindle_cuda_abi::arguments::{Out, Text};
use rekindle_cuda_abi::lookup::{self, Miss};
use rekindle_cuda_abi::private;
use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, CUresult, result_text,
};

use crate::config::config;
use crate::exports::{LOOKUPS, SYMBOLS};
use crate::host::SoftwareGpu;
use crate::status::{Result, ensure, status, utf8};
use crate::{current, process};

pub fn cuInit(flags: u32) -> CUresult {
    status(|| {
        ensure(flags == 0, CUDA_ERROR_INVALID_VALUE)?;
        process::initialize()
    })
}

pub fn cuDriverGetVersion(version: Out<i32>) -> CUresult {
    status(|| version.put(config().version))
}

pub fn cuGetErrorName(error: CUresult, name: Out<*const c_char>) -> CUresult {
    error_text(error, name, true)
}

pub fn cuGetErrorString(error: CUresult, description: Out<*const c_char>) -> CUresult {
    error_text(error, description, false)
}

fn error_text(error: CUresult, out: Out<*const c_char>, name: bool) -> CUresult {
    let found = result_text(error, name);
    let put = status(|| out.put(found.unwrap_or(std::ptr::null())));
    if found.is_none() { CUDA_ERROR_INVALID_VALUE } else { put }
}

/// A name that is not found is an error in the old form of the call, and a status in the new one.
pub fn cuGetProcAddress_v2(
    symbol: Text,
    function: Out<*mut c_void>,
    version: i32,
    flags: u64,
    found: Out<u32>,
) -> CUresult {
    status(|| {
        let name = utf8(symbol)?;
        if version > lookup::NEWEST {
            function.put(std::ptr::null_mut())?;
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let index = find(name, version, flags);
        let address = index.ok().and_then(|i| SYMBOLS.get(usize::from(i)));
        let address = address.map_or(std::ptr::null_mut(), |symbol| symbol.1 as *mut c_void);
        function.put(address)?;
        found.put_if(index.err().map_or(0, |miss| miss as u32));
        ensure(index.is_ok() || !found.is_null(), CUDA_ERROR_NOT_FOUND)
    })
}

pub fn cuGetProcAddress(symbol: Text, function: Out<*mut c_void>, version: i32, flags: u64) -> CUresult {
    cuGetProcAddress_v2(symbol, function, version, flags, Out::null())
}

fn find(name: &str, version: i32, flags: u64) -> std::result::Result<u16, Miss> {
    lookup::find(&LOOKUPS, name, version.max(0).cast_unsigned(), flags)
}

pub unsafe fn cuGetExportTable(table: *mut *const c_void, uuid: *const [u8; 16]) -> CUresult {
    // SAFETY: null, or an identifier and room for a pointer, by the caller's promise.
    unsafe { private::export_table(&SoftwareGpu, uuid, table) }
}

/// The driver has refused this call since 12.0.
pub fn cuProfilerInitialize(_: *const c_char, _: *const c_char, _: u32) -> CUresult {
    CUDA_ERROR_NOT_SUPPORTED
}

pub fn cuProfilerStart() -> CUresult {
    status(|| current::current().map(drop))
}

pub fn cuProfilerStop() -> CUresult {
    status(|| current::current().map(drop))
}

/// Libraries that can load all their code at start ask this first.
pub fn cuModuleGetLoadingMode(mode: Out<u32>) -> CUresult {
    const LAZY: u32 = 2;
    let answer: Result<()> = mode.put(LAZY);
    answer.err().unwrap_or(CUDA_SUCCESS)
}

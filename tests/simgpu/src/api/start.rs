//! Initialisation, versions, look-up, error texts, the profiler.

use std::ffi::{c_char, c_void};

use rekindle_cuda_abi::lookup::{self, Miss};
use rekindle_cuda_abi::private;
use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, CUresult, result_text,
};

use crate::exports::{LOOKUPS, SYMBOLS};
use crate::host::{DRIVER_VERSION, SoftwareGpu};
use crate::status::{Result, ensure, put, put_if, status, text};
use crate::{current, process};

pub unsafe fn cuInit(flags: u32) -> CUresult {
    status(|| {
        ensure(flags == 0, CUDA_ERROR_INVALID_VALUE)?;
        process::initialize()
    })
}

pub unsafe fn cuDriverGetVersion(version: *mut i32) -> CUresult {
    status(|| unsafe { put(version, DRIVER_VERSION) })
}

pub unsafe fn cuGetErrorName(error: CUresult, name: *mut *const c_char) -> CUresult {
    unsafe { error_text(error, name, true) }
}

pub unsafe fn cuGetErrorString(error: CUresult, description: *mut *const c_char) -> CUresult {
    unsafe { error_text(error, description, false) }
}

unsafe fn error_text(error: CUresult, out: *mut *const c_char, name: bool) -> CUresult {
    let found = result_text(error, name);
    let put = status(|| unsafe { put(out, found.unwrap_or(std::ptr::null())) });
    if found.is_none() { CUDA_ERROR_INVALID_VALUE } else { put }
}

/// A name that is not found is an error for the old form, and a status for the new one.
pub unsafe fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: i32,
    flags: u64,
    found: *mut u32,
) -> CUresult {
    status(|| {
        let name = unsafe { text(symbol) }?;
        if version > lookup::NEWEST {
            unsafe { put(function, std::ptr::null_mut()) }?;
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let index = find(name, version, flags);
        let address = index.ok().and_then(|i| SYMBOLS.get(usize::from(i)));
        let address = address.map_or(std::ptr::null_mut(), |symbol| symbol.1 as *mut c_void);
        unsafe {
            put(function, address)?;
            put_if(found, index.err().map_or(0, |miss| miss as u32));
        }
        ensure(index.is_ok() || !found.is_null(), CUDA_ERROR_NOT_FOUND)
    })
}

pub unsafe fn cuGetProcAddress(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: i32,
    flags: u64,
) -> CUresult {
    unsafe { cuGetProcAddress_v2(symbol, function, version, flags, std::ptr::null_mut()) }
}

fn find(name: &str, version: i32, flags: u64) -> std::result::Result<u16, Miss> {
    lookup::find(&LOOKUPS, name, version.max(0).cast_unsigned(), flags)
}

pub unsafe fn cuGetExportTable(table: *mut *const c_void, uuid: *const [u8; 16]) -> CUresult {
    unsafe { private::export_table(&SoftwareGpu, uuid, table) }
}

/// What the driver has answered since 12.0.
pub unsafe fn cuProfilerInitialize(_: *const c_char, _: *const c_char, _: u32) -> CUresult {
    CUDA_ERROR_NOT_SUPPORTED
}

pub unsafe fn cuProfilerStart() -> CUresult {
    status(|| current::current().map(drop))
}

pub unsafe fn cuProfilerStop() -> CUresult {
    status(|| current::current().map(drop))
}

/// Libraries that would load everything at start ask for this first.
pub unsafe fn cuModuleGetLoadingMode(mode: *mut u32) -> CUresult {
    const LAZY: u32 = 2;
    let answer: Result<()> = unsafe { put(mode, LAZY) };
    answer.err().unwrap_or(CUDA_SUCCESS)
}

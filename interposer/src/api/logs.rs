//! The log of errors that programs can read. It says why Rekindle refused calls.

use std::ffi::{CStr, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rekindle_cuda_abi::logs::Callback;
use rekindle_cuda_abi::raw::read;
use rekindle_cuda_abi::types::*;

use super::{code, put, put_if};
use crate::process::log::LOGS;

pub(crate) unsafe fn cuLogsRegisterCallback(function: *mut c_void, data: *mut c_void, handle: *mut u64) -> CUresult {
    if function.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, so a function of this type by cuda.h's contract, which may be called until it is unregistered.
    unsafe {
        let function = std::mem::transmute::<*mut c_void, Callback>(function);
        put_if(handle, LOGS.register(function, data));
    }
    CUDA_SUCCESS
}

pub(crate) unsafe fn cuLogsUnregisterCallback(handle: u64) -> CUresult {
    code(LOGS.unregister(handle))
}

// There are no flags, and the driver ignores them.

pub(crate) unsafe fn cuLogsCurrent(iterator: *mut u32, _flags: u32) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(unsafe { put(iterator, LOGS.current()) })
}

pub(crate) unsafe fn cuLogsDumpToFile(iterator: *mut u32, path: *const c_char, _flags: u32) -> CUresult {
    if path.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, so a C string by the caller's promise; an iterator is null or a number.
    unsafe {
        let path = Path::new(OsStr::from_bytes(CStr::from_ptr(path).to_bytes()));
        code(LOGS.write_file(read(iterator).ok(), path).map(|next| put_if(iterator, next)))
    }
}

pub(crate) unsafe fn cuLogsDumpToMemory(
    iterator: *mut u32,
    buffer: *mut c_char,
    size: *mut usize,
    _flags: u32,
) -> CUresult {
    if buffer.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: the caller's promise by cuda.h: an iterator is null or a number, and the buffer has room for `size` bytes.
    let dumped = unsafe {
        read(size).and_then(|room| {
            let text = LOGS.read(read(iterator).ok(), room.saturating_sub(1)).inspect_err(|_| put_if(size, 0));
            let (text, next) = text?;
            if room > 0 {
                buffer.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
                buffer.add(text.len()).write(0);
            }
            put_if(iterator, next);
            put(size, text.len())
        })
    };
    code(dumped)
}

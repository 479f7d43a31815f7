//! The log of errors that programs can read: what the library refuses.

use std::ffi::{OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rekindle_cuda_abi::arguments::{InOut, Out, Text};
use rekindle_cuda_abi::logs::Callback;
use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUresult};

use crate::process::LOGS;
use crate::status::{ensure, status};

pub unsafe fn cuLogsRegisterCallback(function: *mut c_void, data: *mut c_void, handle: Out<u64>) -> CUresult {
    status(|| {
        ensure(!function.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: not null, so a function of this type, which may be called until it is unregistered: the caller's promise.
        handle.put_if(unsafe { LOGS.register(std::mem::transmute::<*mut c_void, Callback>(function), data) });
        Ok(())
    })
}

pub fn cuLogsUnregisterCallback(handle: u64) -> CUresult {
    status(|| LOGS.unregister(handle))
}

// There are no flags, and the driver ignores them.

pub fn cuLogsCurrent(iterator: Out<u32>, _flags: u32) -> CUresult {
    status(|| iterator.put(LOGS.current()))
}

fn from(iterator: InOut<u32>) -> Option<u32> {
    iterator.read().ok().map(|number| *number)
}

pub fn cuLogsDumpToFile(iterator: InOut<u32>, path: Text, _flags: u32) -> CUresult {
    status(|| {
        let path = Path::new(OsStr::from_bytes(path.read()?.to_bytes()));
        let next = LOGS.write_file(from(iterator), path)?;
        let _ = iterator.put(next);
        Ok(())
    })
}

pub unsafe fn cuLogsDumpToMemory(
    iterator: InOut<u32>,
    buffer: *mut c_char,
    size: InOut<usize>,
    _flags: u32,
) -> CUresult {
    status(|| {
        ensure(!buffer.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let room = *size.read()?;
        let (text, next) = LOGS.read(from(iterator), room.saturating_sub(1)).inspect_err(|_| {
            let _ = size.put(0);
        })?;
        if room > 0 {
            // SAFETY: not null, so with room for the text and a NUL by the caller's promise.
            unsafe {
                buffer.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
                buffer.add(text.len()).write(0);
            }
        }
        let _ = iterator.put(next);
        size.put(text.len())
    })
}

//! The checkpoint of another process.

use std::ffi::c_void;

use rekindle_cuda_abi::arguments::Out;
use rekindle_cuda_abi::checkpoint::{LockArgs, RestoreArgs};
use rekindle_cuda_abi::raw;
use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUresult};

use crate::checkpoint::remote::{Remote, Request};
use crate::status::{ensure, status};

pub fn cuCheckpointProcessGetRestoreThreadId(pid: i32, tid: Out<i32>) -> CUresult {
    status(|| tid.put(Remote::open(pid)?.thread()?))
}

pub unsafe fn cuCheckpointProcessGetState(pid: i32, state: *mut c_void) -> CUresult {
    status(|| {
        let found = Remote::open(pid)?.state();
        // SAFETY: null, or room for the enumeration, by the caller's promise.
        unsafe { raw::put(state.cast::<u32>(), found) }
    })
}

pub unsafe fn cuCheckpointProcessLock(pid: i32, args: *mut c_void) -> CUresult {
    status(|| {
        let args = args.cast::<LockArgs>();
        // SAFETY: null, or the structure, by the caller's promise.
        let args = if args.is_null() { LockArgs::default() } else { unsafe { raw::read(args)? } };
        ensure(args.reserved0 == 0 && args.reserved == [0; 7], CUDA_ERROR_INVALID_VALUE)?;
        Remote::open(pid)?.ask(Request::Lock, args.timeout_ms)
    })
}

pub unsafe fn cuCheckpointProcessCheckpoint(pid: i32, args: *mut c_void) -> CUresult {
    // SAFETY: the caller's promise.
    status(|| unsafe { is_zero(args) }.and_then(|()| Remote::open(pid)?.ask(Request::Checkpoint, 0)))
}

pub unsafe fn cuCheckpointProcessRestore(pid: i32, args: *mut c_void) -> CUresult {
    status(|| {
        if !args.is_null() {
            // SAFETY: the structure, by the caller's promise.
            let args = unsafe { raw::read(args.cast::<RestoreArgs>())? };
            ensure(args.reserved0 == [0; 44] && args.reserved1 == 0, CUDA_ERROR_INVALID_VALUE)?;
            ensure(args.count == 0 && args.pairs.is_null(), CUDA_ERROR_NOT_SUPPORTED)?;
        }
        Remote::open(pid)?.ask(Request::Restore, 0)
    })
}

pub unsafe fn cuCheckpointProcessUnlock(pid: i32, args: *mut c_void) -> CUresult {
    // SAFETY: the caller's promise.
    status(|| unsafe { is_zero(args) }.and_then(|()| Remote::open(pid)?.ask(Request::Unlock, 0)))
}

/// Whether a structure of reserved fields has nothing in them.
///
/// # Safety
/// It is null, or 64 bytes.
unsafe fn is_zero(args: *mut c_void) -> Result<(), CUresult> {
    if args.is_null() {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    ensure(unsafe { raw::read(args.cast::<[u64; 8]>())? } == [0; 8], CUDA_ERROR_INVALID_VALUE)
}

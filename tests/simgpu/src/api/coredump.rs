//! The settings for core dumps of GPUs. None is ever written: kernels run in the program's own process.

use std::ffi::c_void;
use std::sync::PoisonError;

use rekindle_cuda_abi::coredump::Scope;
use rekindle_cuda_abi::types::CUresult;

use crate::context::coredumps;
use crate::current;
use crate::status::status;

pub unsafe fn cuCoredumpGetAttribute(attribute: u32, value: *mut c_void, size: *mut usize) -> CUresult {
    status(|| {
        let context = current::current()?;
        let settings = context.coredumps.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's promise.
        unsafe { settings.get(attribute, value, size) }
    })
}

pub unsafe fn cuCoredumpSetAttribute(attribute: u32, value: *mut c_void, size: *mut usize) -> CUresult {
    status(|| {
        let context = current::current()?;
        let mut settings = context.coredumps.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's promise.
        unsafe { settings.set(Scope::Context, attribute, value, size) }
    })
}

pub unsafe fn cuCoredumpGetAttributeGlobal(attribute: u32, value: *mut c_void, size: *mut usize) -> CUresult {
    // SAFETY: the caller's promise.
    status(|| unsafe { coredumps().get(attribute, value, size) })
}

pub unsafe fn cuCoredumpSetAttributeGlobal(attribute: u32, value: *mut c_void, size: *mut usize) -> CUresult {
    // SAFETY: the caller's promise.
    status(|| unsafe { coredumps().set(Scope::Global, attribute, value, size) })
}

//! The settings for core dumps of GPUs. The environment and the program decide them as with the driver.

use std::ffi::c_void;

use rekindle_cuda_abi::coredump::Scope;
use rekindle_cuda_abi::types::*;

use super::code;
use crate::state::client;
use crate::state::coredumps::warn_of;

pub(crate) unsafe fn cuCoredumpGetAttribute(attribute: u32, value: *mut c_void, size: *mut usize) -> CUresult {
    code(client::get().and_then(|client| {
        let (handle, context) = client.contexts.current_itself()?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { client.coredumps.lock().of_context(handle, context.flags).get(attribute, value, size) }
    }))
}

pub(crate) unsafe fn cuCoredumpSetAttribute(attribute: u32, value: *mut c_void, size: *mut usize) -> CUresult {
    code(client::get().and_then(|client| {
        let (handle, context) = client.contexts.current_itself()?;
        let mut known = client.coredumps.lock();
        let settings = known.of_context(handle, context.flags);
        // SAFETY: the caller's promise by cuda.h.
        unsafe { settings.set(Scope::Context, attribute, value, size) }?;
        warn_of(settings);
        Ok(())
    }))
}

pub(crate) unsafe fn cuCoredumpGetAttributeGlobal(attribute: u32, value: *mut c_void, size: *mut usize) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(client::get().and_then(|client| unsafe { client.coredumps.lock().global.get(attribute, value, size) }))
}

pub(crate) unsafe fn cuCoredumpSetAttributeGlobal(attribute: u32, value: *mut c_void, size: *mut usize) -> CUresult {
    code(client::get().and_then(|client| {
        let mut known = client.coredumps.lock();
        known.keep_in(&client.contexts);
        // SAFETY: the caller's promise by cuda.h.
        unsafe { known.global.set(Scope::Global, attribute, value, size) }?;
        warn_of(&known.global);
        Ok(())
    }))
}

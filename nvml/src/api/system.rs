//! Start and end, errors, versions, and names of processes.

use std::ffi::c_char;

use super::{put, put_text};
use crate::result::*;
use crate::{Answered, state};

/// The version of this library, if the machine's library does not report one.
const OWN_VERSION: &str = "13.0";

pub(crate) unsafe fn nvmlInit() -> Answered {
    state::initialise()
}

pub(crate) unsafe fn nvmlInit_v2() -> Answered {
    state::initialise()
}

/// The flags allow a machine without GPUs, and ask not to attach them: neither changes anything here.
pub(crate) unsafe fn nvmlInitWithFlags(_flags: u32) -> Answered {
    state::initialise()
}

pub(crate) unsafe fn nvmlShutdown() -> Answered {
    state::shut_down()
}

pub(crate) fn nvmlErrorString(error: u32) -> *const c_char {
    text(error).as_ptr()
}

pub(crate) unsafe fn nvmlSystemGetDriverVersion(version: *mut c_char, length: u32) -> Answered {
    let facts = state::facts()?;
    let known = facts.0.driver_version.as_deref().ok_or(ERROR_NOT_SUPPORTED)?;
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put_text(version, length, known) }
}

pub(crate) unsafe fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: u32) -> Answered {
    let facts = state::facts()?;
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put_text(version, length, facts.0.nvml_version.as_deref().unwrap_or(OWN_VERSION)) }
}

pub(crate) unsafe fn nvmlSystemGetCudaDriverVersion(version: *mut i32) -> Answered {
    let facts = state::facts()?;
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put(version, facts.0.cuda_driver_version) }
}

pub(crate) unsafe fn nvmlSystemGetCudaDriverVersion_v2(version: *mut i32) -> Answered {
    // SAFETY: the caller's promise by nvml.h.
    unsafe { nvmlSystemGetCudaDriverVersion(version) }
}

pub(crate) unsafe fn nvmlSystemGetProcessName(pid: u32, name: *mut c_char, length: u32) -> Answered {
    state::facts()?;
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| ERROR_NOT_FOUND)?;
    let path = line.split(|byte| *byte == 0).next().unwrap_or_default();
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put_text(name, length, &String::from_utf8_lossy(path)) }
}

pub(crate) unsafe fn nvmlUnitGetCount(count: *mut u32) -> Answered {
    state::facts()?;
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put(count, 0) }
}

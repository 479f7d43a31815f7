//! The functions that launch kernels.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{COOPERATIVE, EVENT_ATTRIBUTES, Launch, PLAIN_ATTRIBUTES};

use super::code;
use crate::operations::launch::{Origin, launch};

pub(crate) unsafe fn cuLaunchKernel(
    f: CUfunction,
    gx: u32,
    gy: u32,
    gz: u32,
    bx: u32,
    by: u32,
    bz: u32,
    shared_bytes: u32,
    stream: CUstream,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    if !params.is_null() && !extra.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let what = Launch {
        function: f,
        grid: [gx, gy, gz],
        block: [bx, by, bz],
        shared_bytes,
        flags: 0,
        stream,
        attributes: &[],
        parameters: &[],
    };
    // SAFETY: the caller's promise by cuda.h.
    code(unsafe { launch(what, params, extra, Origin::Call) })
}

pub(crate) unsafe fn cuLaunchCooperativeKernel(
    f: CUfunction,
    gx: u32,
    gy: u32,
    gz: u32,
    bx: u32,
    by: u32,
    bz: u32,
    shared_bytes: u32,
    stream: CUstream,
    params: *mut *mut c_void,
) -> CUresult {
    let what = Launch {
        function: f,
        grid: [gx, gy, gz],
        block: [bx, by, bz],
        shared_bytes,
        flags: COOPERATIVE,
        stream,
        attributes: &[],
        parameters: &[],
    };
    // SAFETY: the caller's promise by cuda.h.
    code(unsafe { launch(what, params, std::ptr::null_mut(), Origin::Call) })
}

pub(crate) unsafe fn cuLaunchKernelEx(
    config: *const CUlaunchConfig,
    f: CUfunction,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    if config.is_null() || (!params.is_null() && !extra.is_null()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, so a configuration by the caller's promise.
    let config = unsafe { config.read() };
    // SAFETY: as above, with its attributes.
    let attributes = match unsafe { attribute_bytes(&config) } {
        Ok(attributes) => attributes,
        Err(error) => return error,
    };
    // SAFETY: the caller's promise by cuda.h.
    code(unsafe { launch(with_attributes(f, &config, &attributes), params, extra, Origin::Call) })
}

/// A configuration's attributes as they travel.
///
/// # Safety
/// The configuration's array holds as many attributes as it says.
pub(super) unsafe fn attribute_bytes(config: &CUlaunchConfig) -> Result<Vec<u8>, CUresult> {
    // SAFETY: the caller's promise.
    let attributes = unsafe { config.attributes() }?;
    let travels = |id| PLAIN_ATTRIBUTES.contains(&id) || EVENT_ATTRIBUTES.contains(&id);
    if attributes.iter().any(|a| !travels(a.id)) {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    let mut bytes = Vec::with_capacity(size_of_val(attributes));
    for a in attributes {
        // Field by field: the padding may hold anything, and would make equal configurations differ.
        bytes.extend_from_slice(&u64::from(a.id).to_le_bytes());
        a.value.iter().for_each(|v| bytes.extend_from_slice(&v.to_le_bytes()));
    }
    Ok(bytes)
}

/// A configuration as a launch, without parameters.
pub(super) fn with_attributes<'a>(f: CUfunction, config: &CUlaunchConfig, attributes: &'a [u8]) -> Launch<'a> {
    Launch {
        function: f,
        grid: config.grid,
        block: config.block,
        shared_bytes: config.shared_bytes,
        flags: 0,
        stream: config.stream,
        attributes,
        parameters: &[],
    }
}

//! Attributes of functions.

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::Kind;

use crate::call::remote;
use crate::state::client::Client;

/// An attribute of a function, or of a kernel on one of the worker's devices: of that the driver does not say it by
/// `cuFuncGetAttribute`.
pub(crate) fn attribute(client: &Client, function: u64, device: usize, which: u32) -> Result<i32, CUresult> {
    let mut value = 0;
    // SAFETY: the out parameter is a local.
    check(unsafe {
        if Kind::Kernel.owns(function) {
            remote::cuKernelGetAttribute(&raw mut value, which, function, client.devices.ordinal(device))
        } else {
            remote::cuFuncGetAttribute(&raw mut value, which, function)
        }
    })?;
    Ok(value)
}

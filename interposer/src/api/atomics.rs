//! Which atomic operations the links of devices have, to the host and to each other.
//!
//! The functions are of CUDA 13.0, and workers run with older drivers, too. An older driver is asked whether the link has atomic
//! operations at all: one that has none supports none of them.

use rekindle_cuda_abi::atomics::OPERATIONS;
use rekindle_cuda_abi::types::*;

use super::{check, code};
use crate::call::remote;
use crate::process::log;
use crate::state::client;

/// `CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED`.
const HOST_NATIVE_ATOMICS: u32 = 86;
/// `CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED`.
const PEER_NATIVE_ATOMICS: u32 = 3;

/// Writes what a link supports of each operation. `ask` has the driver say it of one, `any` whether the link has atomic
/// operations; `refused` is what is logged if an older driver does not say more.
///
/// # Safety
/// The arrays are null, or have `count` elements.
unsafe fn answer(
    (capabilities, operations, count): (*mut u32, *const u32, u32),
    ask: impl Fn(*mut u32, *const u32) -> CUresult,
    any: impl Fn() -> Result<bool, CUresult>,
    refused: &'static str,
) -> Result<(), CUresult> {
    if capabilities.is_null() || operations.is_null() || count == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so arrays of that length by the caller's promise.
    let (operations, capabilities) = unsafe {
        (
            std::slice::from_raw_parts(operations, count as usize),
            std::slice::from_raw_parts_mut(capabilities, count as usize),
        )
    };
    if operations.iter().any(|operation| *operation >= OPERATIONS) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    for (operation, capability) in operations.iter().zip(capabilities.iter_mut()) {
        match ask(capability, operation) {
            CUDA_ERROR_NOT_SUPPORTED if any()? => {
                log::refused(refused);
                return Err(CUDA_ERROR_NOT_SUPPORTED);
            }
            CUDA_ERROR_NOT_SUPPORTED => *capability = 0,
            result => check(result)?,
        }
    }
    Ok(())
}

pub(crate) unsafe fn cuDeviceGetHostAtomicCapabilities(
    capabilities: *mut u32,
    operations: *const u32,
    count: u32,
    dev: CUdevice,
) -> CUresult {
    let any = || {
        let client = client::get()?;
        let value = client.devices.of_ordinal(dev)?.attributes.get(HOST_NATIVE_ATOMICS as usize);
        Ok(value.is_some_and(|value| *value != (CUDA_SUCCESS, 0)))
    };
    // SAFETY: an operation and room for what is said of it.
    let ask =
        |capability, operation| unsafe { remote::cuDeviceGetHostAtomicCapabilities(capability, operation, 1, dev) };
    const REFUSED: &str =
        "cuDeviceGetHostAtomicCapabilities of a link with atomic operations with a driver before CUDA 13.0";
    // SAFETY: the caller's promise by cuda.h.
    code(unsafe { answer((capabilities, operations, count), ask, any, REFUSED) })
}

pub(crate) unsafe fn cuDeviceGetP2PAtomicCapabilities(
    capabilities: *mut u32,
    operations: *const u32,
    count: u32,
    src: CUdevice,
    dst: CUdevice,
) -> CUresult {
    let any = || {
        let mut value = 0;
        // SAFETY: the out parameter is a local.
        check(unsafe { remote::cuDeviceGetP2PAttribute(&raw mut value, PEER_NATIVE_ATOMICS, src, dst) })?;
        Ok(value != 0)
    };
    // SAFETY: an operation and room for what is said of it.
    let ask =
        |capability, operation| unsafe { remote::cuDeviceGetP2PAtomicCapabilities(capability, operation, 1, src, dst) };
    const REFUSED: &str =
        "cuDeviceGetP2PAtomicCapabilities of a link with atomic operations with a driver before CUDA 13.0";
    // SAFETY: the caller's promise by cuda.h.
    code(unsafe { answer((capabilities, operations, count), ask, any, REFUSED) })
}

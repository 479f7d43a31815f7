//! `nvmlReturn_t`, and the texts of `nvmlErrorString`.

use std::ffi::CStr;

pub(crate) const SUCCESS: u32 = 0;
pub(crate) const ERROR_UNINITIALIZED: u32 = 1;
pub(crate) const ERROR_INVALID_ARGUMENT: u32 = 2;
pub(crate) const ERROR_NOT_SUPPORTED: u32 = 3;
pub(crate) const ERROR_NO_PERMISSION: u32 = 4;
pub(crate) const ERROR_NOT_FOUND: u32 = 6;
pub(crate) const ERROR_INSUFFICIENT_SIZE: u32 = 7;
pub(crate) const ERROR_DRIVER_NOT_LOADED: u32 = 9;
pub(crate) const ERROR_LIB_RM_VERSION_MISMATCH: u32 = 18;
pub(crate) const ERROR_ARGUMENT_VERSION_MISMATCH: u32 = 25;
pub(crate) const ERROR_UNKNOWN: u32 = 999;

/// The texts by the errors' numbers.
const TEXTS: &[&CStr] = &[
    c"Success",
    c"Uninitialized",
    c"Invalid Argument",
    c"Not Supported",
    c"Insufficient Permissions",
    c"Already Initialized",
    c"Not Found",
    c"Insufficient Size",
    c"Insufficient External Power",
    c"Driver Not Loaded",
    c"Timeout",
    c"Interrupt Request Issue",
    c"NVML Shared Library Not Found",
    c"Function Not Found",
    c"Corrupted infoROM",
    c"GPU is lost",
    c"GPU requires reset",
    c"GPU access blocked by the operating system",
    c"Driver/library version mismatch",
    c"In use by another client",
    c"Insufficient Memory",
    c"No data",
    c"ECC mode not supported for vGPU",
    c"Insufficient Resources",
    c"Frequency not supported",
    c"Argument version mismatch",
    c"Deprecated",
    c"Not ready",
    c"GPU not found",
    c"Invalid state",
    c"Reset type not supported",
];

/// The text of an error.
pub(crate) fn text(error: u32) -> &'static CStr {
    TEXTS.get(error as usize).unwrap_or(&c"Unknown Error")
}

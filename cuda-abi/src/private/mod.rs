//! The private tables of `cuGetExportTable`.
//!
//! The CUDA runtime and the libraries built on it ask the driver for tables of functions by UUID, which no header
//! declares. What they call in them can all be answered in the calling process. A table is an array of 64-bit
//! slots: slot 0 holds the table's size in bytes (the storage table has none), the others functions. Slots that
//! nobody is known to call hold a function that refuses.
//!
//! ```text
//!   cuGetExportTable(uuid) ── export_table ──► tables     CUDART TLS HOOKS CHK ToolsContext ToolsModule
//!                                         ├──► storage    CLS: values that libraries keep per context
//!                                         ├──► handshake  INT: the runtime checks the driver by an HMAC
//!                                         └──► compute_cache  what compilers keep on disk
//! ```
//!
//! The tables are the same for every [`Host`]: what they need to know of the driver around them, they ask it.

mod compute_cache;
mod handshake;
mod hmac_md2;
mod host;
mod storage;
mod tables;

use std::ffi::c_void;

use crate::types::{CUDA_ERROR_INVALID_VALUE, CUDA_SUCCESS, CUresult};

pub use host::{DeviceIdentity, Host};
pub use storage::reset_context as cls_reset;

/// Answers `cuGetExportTable`. The host of the first call serves all later ones; tables never move.
///
/// # Safety
///
/// `uuid` and `out` must each be null or valid, `uuid` to read 16 bytes and `out` to write a pointer.
pub unsafe fn export_table(host: &'static dyn Host, uuid: *const [u8; 16], out: *mut *const c_void) -> CUresult {
    if uuid.is_null() || out.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    host::serve(host);
    // SAFETY: not null, so valid to read by the caller's promise.
    let uuid = u128::from_be_bytes(unsafe { uuid.read_unaligned() });
    let Some(table) = tables::find(uuid) else { return CUDA_ERROR_INVALID_VALUE };
    // SAFETY: not null, so valid to write by the caller's promise.
    unsafe { out.write(table) };
    CUDA_SUCCESS
}

#[cfg(test)]
mod tests;

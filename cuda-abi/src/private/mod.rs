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
mod storage;
mod tables;

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use crate::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_UNKNOWN, CUDA_SUCCESS, CUcontext, CUdevice,
    CUfunction, CUmodule, CUresult, CUstream,
};

pub use storage::reset_context as cls_reset;

/// What a device is known by: `cuDeviceGetUuid_v2` and the attributes 50 (domain), 33 (bus) and 34 (device).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceIdentity {
    /// Its UUID.
    pub uuid: [u8; 16],
    /// PCI domain, bus and device.
    pub pci: [i32; 3],
}

/// The driver around the tables: the interposer, or the software GPU.
///
/// Its answers must agree with what the public functions say: the runtime compares some of them.
pub trait Host: Sync {
    /// What `cuDriverGetVersion` says.
    fn driver_version(&self) -> i32;

    /// The devices in order.
    fn devices(&self) -> Vec<DeviceIdentity>;

    /// The handle that the device's primary context has or will have; it is not activated.
    fn primary_context(&self, device: CUdevice) -> Result<CUcontext, CUresult>;

    /// What `cuCtxGetCurrent` says; 0 where there is none.
    fn current_context(&self) -> Result<CUcontext, CUresult>;

    /// What `cuCtxGetId` says.
    fn context_id(&self, context: CUcontext) -> Result<u64, CUresult>;

    /// What `cuStreamGetId` says of the stream in that context. With `per_thread`, stream 0 is the per-thread
    /// default stream.
    fn stream_id(&self, context: CUcontext, stream: CUstream, per_thread: bool) -> Result<u64, CUresult>;

    /// What `cuModuleEnumerateFunctions` says, in its order.
    fn module_functions(&self, context: CUcontext, module: CUmodule) -> Result<Vec<CUfunction>, CUresult>;
}

static HOST: OnceLock<&'static dyn Host> = OnceLock::new();

/// Answers `cuGetExportTable`. The host of the first call serves all later ones; tables never move.
///
/// # Safety
///
/// `uuid` and `out` must each be null or valid, `uuid` to read 16 bytes and `out` to write a pointer.
pub unsafe fn export_table(host: &'static dyn Host, uuid: *const [u8; 16], out: *mut *const c_void) -> CUresult {
    if uuid.is_null() || out.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    HOST.get_or_init(|| host);
    // SAFETY: not null, so valid to read by the caller's promise.
    let uuid = u128::from_be_bytes(unsafe { uuid.read_unaligned() });
    let Some(table) = tables::find(uuid) else { return CUDA_ERROR_INVALID_VALUE };
    // SAFETY: not null, so valid to write by the caller's promise.
    unsafe { out.write(table) };
    CUDA_SUCCESS
}

/// Runs the body of a table's function with the host, and turns what it says into a code. Panics stay inside.
fn answer(body: impl FnOnce(&dyn Host) -> Result<(), CUresult>) -> CUresult {
    let Some(host) = HOST.get() else { return CUDA_ERROR_NOT_INITIALIZED };
    match catch_unwind(AssertUnwindSafe(|| body(*host))) {
        Ok(Ok(())) => CUDA_SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => CUDA_ERROR_UNKNOWN,
    }
}

/// Writes through a pointer that C passed.
///
/// # Safety
///
/// `out` must be null or valid to write.
unsafe fn put<T>(out: *mut T, value: T) -> Result<(), CUresult> {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so valid to write by the caller's promise.
    unsafe { out.write(value) };
    Ok(())
}

#[cfg(test)]
mod tests;

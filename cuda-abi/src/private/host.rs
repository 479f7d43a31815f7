//! The driver around the tables, and how their functions ask it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use crate::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_UNKNOWN, CUDA_SUCCESS, CUcontext, CUdevice,
    CUfunction, CUmodule, CUresult, CUstream,
};

/// The identity of a device: `cuDeviceGetUuid_v2` and the attributes 50 (domain), 33 (bus) and 34 (device).
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
    /// The result of `cuDriverGetVersion`.
    fn driver_version(&self) -> i32;

    /// The devices in order.
    fn devices(&self) -> Vec<DeviceIdentity>;

    /// The handle that the device's primary context has or will have; it is not activated.
    fn primary_context(&self, device: CUdevice) -> Result<CUcontext, CUresult>;

    /// The result of `cuCtxGetCurrent`; 0 where there is no current context.
    fn current_context(&self) -> Result<CUcontext, CUresult>;

    /// The result of `cuCtxGetId`.
    fn context_id(&self, context: CUcontext) -> Result<u64, CUresult>;

    /// The result of `cuStreamGetId` for the stream in that context. With `per_thread`, stream 0 is the per-thread
    /// default stream.
    fn stream_id(&self, context: CUcontext, stream: CUstream, per_thread: bool) -> Result<u64, CUresult>;

    /// The result of `cuModuleEnumerateFunctions`, in its order.
    fn module_functions(&self, context: CUcontext, module: CUmodule) -> Result<Vec<CUfunction>, CUresult>;
}

static HOST: OnceLock<&'static dyn Host> = OnceLock::new();

/// From the first call on this host serves all tables.
pub(super) fn serve(host: &'static dyn Host) {
    HOST.get_or_init(|| host);
}

/// Runs the body of a table's function with the host, and turns what it says into a code. Panics stay inside.
pub(super) fn answer(body: impl FnOnce(&dyn Host) -> Result<(), CUresult>) -> CUresult {
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
pub(super) unsafe fn put<T>(out: *mut T, value: T) -> Result<(), CUresult> {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so valid to write by the caller's promise.
    unsafe { out.write(value) };
    Ok(())
}

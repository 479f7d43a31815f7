//! Which devices may use mapped memory.

use rekindle_cuda_abi::types::{CU_MEM_LOCATION_TYPE_DEVICE, CUdevice, CUmemAccessDesc};

use crate::gpu::driver::{CallFailed, Driver, checked};

/// Gives a device access to a mapped range, or takes it away.
pub(super) fn set_access(
    driver: &Driver,
    address: u64,
    length: u64,
    device: CUdevice,
    flags: u32,
) -> Result<(), CallFailed> {
    let access = CUmemAccessDesc { location_type: CU_MEM_LOCATION_TYPE_DEVICE, location_id: device, flags };
    // SAFETY: the descriptor lives through the call.
    let result = unsafe { (driver.cuMemSetAccess)(address, length as usize, &raw const access, 1) };
    checked("cuMemSetAccess", result)
}

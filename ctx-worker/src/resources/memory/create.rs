//! How pieces of physical memory are made.

use rekindle_cuda_abi::types::{
    CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE, CUdevice,
    CUmemAllocationProp,
};

use crate::gpu::driver::{CallFailed, Driver, checked};

/// Makes a piece on a device. Returns the driver's handle.
pub(super) fn create(driver: &Driver, device: CUdevice, size: u64) -> Result<u64, CallFailed> {
    let (properties, mut piece) = (properties(device), 0_u64);
    // SAFETY: the out parameter is a local, and the properties live through the call.
    let created = unsafe { (driver.cuMemCreate)((&raw mut piece).cast(), size as usize, &raw const properties, 0) };
    checked("cuMemCreate", created).map(|()| piece)
}

/// How pieces are made.
fn properties(device: CUdevice) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        location_type: CU_MEM_LOCATION_TYPE_DEVICE,
        location_id: device,
        // Another process may ask for any piece.
        handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        ..Default::default()
    }
}

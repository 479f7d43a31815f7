//! The functions that replace the driver's in a worker with virtual GPUs.

#![allow(non_snake_case, reason = "the names are the driver's")]

use std::ffi::{c_char, c_void};
use std::sync::OnceLock;

use rekindle_cuda_abi::types::*;

use super::layer::Layer;
use crate::gpu::driver::Driver;

/// The layer of this process. The driver's functions have no parameter that could lead to it.
static LAYER: OnceLock<Layer> = OnceLock::new();

/// Sets the layer of this process; gives it back if there is one already.
pub(super) fn install(layer: Layer) -> Result<(), Box<Layer>> {
    LAYER.set(layer).map_err(Box::new)
}

/// Replaces functions of a table by those of this file.
macro_rules! replace {
    ($($name:ident),* $(,)?) => {
        /// The driver's table, with the functions that name devices replaced.
        pub(super) fn over(driver: Driver) -> Driver {
            Driver { $($name,)* ..driver }
        }

        /// The functions that are replaced.
        #[cfg(test)]
        const REPLACED: &[&str] = &[$(stringify!($name)),*];
    };
}

replace!(
    cuDeviceGetCount,
    cuDeviceGet,
    cuDeviceGetName,
    cuDeviceGetUuid_v2,
    cuDeviceTotalMem_v2,
    cuDeviceGetAttribute,
    cuDeviceGetPCIBusId,
    cuDeviceGetExecAffinitySupport,
    cuDeviceGetTexture1DLinearMaxWidth,
    cuDeviceCanAccessPeer,
    cuDeviceGetP2PAttribute,
    cuDeviceGetHostAtomicCapabilities,
    cuDeviceGetP2PAtomicCapabilities,
    cuDevicePrimaryCtxRetain,
    cuDevicePrimaryCtxReset_v2,
    cuDevicePrimaryCtxSetFlags_v2,
    cuCtxCreate_v2,
    cuCtxDestroy_v2,
    cuDeviceGetDevResource,
    cuGreenCtxCreate,
    cuCtxEnablePeerAccess,
    cuCtxDisablePeerAccess,
    cuMemGetInfo_v2,
    cuMemCreate,
    cuMemGetAllocationGranularity,
    cuMemMap,
    cuMemUnmap,
    cuMemSetAccess,
    cuKernelGetAttribute,
    cuKernelSetAttribute,
    cuKernelSetCacheConfig,
    cuLaunchCooperativeKernelMultiDevice,
);

/// Has the layer answer a call.
fn answer(by: impl FnOnce(&Layer) -> Result<(), CUresult>) -> CUresult {
    match LAYER.get().map(by) {
        None => CUDA_ERROR_NOT_INITIALIZED,
        Some(Ok(())) => CUDA_SUCCESS,
        Some(Err(code)) => code,
    }
}

/// Has the driver answer a call about the device behind a virtual GPU.
fn forward(device: CUdevice, to: impl FnOnce(&Driver, CUdevice) -> CUresult) -> CUresult {
    answer(|layer| match to(layer.driver(), layer.real(device)?) {
        CUDA_SUCCESS => Ok(()),
        code => Err(code),
    })
}

/// Writes an answer.
///
/// # Safety
///
/// `out` is null or valid for a write.
unsafe fn put<T>(out: *mut T, value: T) -> Result<(), CUresult> {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { out.write(value) };
    Ok(())
}

unsafe extern "C" fn cuDeviceGetCount(count: *mut i32) -> CUresult {
    // SAFETY: the caller's out parameter.
    answer(|layer| unsafe { put(count, layer.gpus().len() as i32) })
}

unsafe extern "C" fn cuDeviceGet(device: *mut CUdevice, ordinal: i32) -> CUresult {
    answer(|layer| {
        layer.gpu(ordinal)?;
        // SAFETY: the caller's out parameter.
        unsafe { put(device, ordinal) }
    })
}

unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: i32, device: CUdevice) -> CUresult {
    // SAFETY: the caller's pointers go to the driver as they are.
    forward(device, |driver, real| unsafe { (driver.cuDeviceGetName)(name, length, real) })
}

unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: CUdevice) -> CUresult {
    // SAFETY: the caller's out parameter.
    answer(|layer| unsafe { put(uuid, layer.gpu(device)?.uuid) })
}

unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) -> CUresult {
    // SAFETY: the caller's out parameter.
    answer(|layer| unsafe { put(bytes, layer.gpu(device)?.memory) })
}

unsafe extern "C" fn cuDeviceGetAttribute(value: *mut i32, attribute: u32, device: CUdevice) -> CUresult {
    // SAFETY: the caller's out parameter.
    answer(|layer| unsafe { put(value, layer.attribute(attribute, device)?) })
}

unsafe extern "C" fn cuDeviceGetPCIBusId(id: *mut c_char, length: i32, device: CUdevice) -> CUresult {
    answer(|layer| {
        let text = &layer.gpu(device)?.pci_bus_id;
        let room = usize::try_from(length).unwrap_or(0);
        if id.is_null() || text.len() >= room {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller has room for `length` bytes, which are more than the text has.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), id.cast(), text.len());
            id.add(text.len()).write(0);
        }
        Ok(())
    })
}

unsafe extern "C" fn cuDeviceGetExecAffinitySupport(supported: *mut i32, kind: u32, device: CUdevice) -> CUresult {
    // SAFETY: the caller's pointers go to the driver as they are.
    forward(device, |driver, real| unsafe { (driver.cuDeviceGetExecAffinitySupport)(supported, kind, real) })
}

unsafe extern "C" fn cuDeviceGetTexture1DLinearMaxWidth(
    elements: *mut usize,
    format: u32,
    channels: u32,
    device: CUdevice,
) -> CUresult {
    let ask = |driver: &Driver, real| {
        // SAFETY: the caller's pointers go to the driver as they are.
        unsafe { (driver.cuDeviceGetTexture1DLinearMaxWidth)(elements, format, channels, real) }
    };
    forward(device, ask)
}

unsafe extern "C" fn cuDeviceCanAccessPeer(can: *mut i32, device: CUdevice, peer: CUdevice) -> CUresult {
    // SAFETY: the caller's out parameter.
    answer(|layer| unsafe { put(can, layer.can_access_peer(device, peer)?) })
}

unsafe extern "C" fn cuDeviceGetP2PAttribute(
    value: *mut i32,
    attribute: u32,
    from: CUdevice,
    to: CUdevice,
) -> CUresult {
    // SAFETY: the caller's out parameter.
    answer(|layer| unsafe { put(value, layer.p2p_attribute(attribute, from, to)?) })
}

unsafe extern "C" fn cuDeviceGetHostAtomicCapabilities(
    capabilities: *mut u32,
    operations: *const u32,
    count: u32,
    device: CUdevice,
) -> CUresult {
    let ask = |driver: &Driver, real| {
        // SAFETY: the caller's pointers go to the driver as they are.
        unsafe { (driver.cuDeviceGetHostAtomicCapabilities)(capabilities, operations, count, real) }
    };
    forward(device, ask)
}

/// A worker asks about one operation at a time.
unsafe extern "C" fn cuDeviceGetP2PAtomicCapabilities(
    capabilities: *mut u32,
    operations: *const u32,
    count: u32,
    from: CUdevice,
    to: CUdevice,
) -> CUresult {
    answer(|layer| {
        if operations.is_null() || count != 1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, so one operation by the caller's promise; and the caller's out parameter.
        unsafe { put(capabilities, layer.p2p_atomic_capability(operations.read(), from, to)?) }
    })
}

unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> CUresult {
    // SAFETY: the caller's out parameter.
    answer(|layer| unsafe { put(context, layer.retain(device)?) })
}

unsafe extern "C" fn cuDevicePrimaryCtxReset_v2(device: CUdevice) -> CUresult {
    answer(|layer| layer.reset(device))
}

unsafe extern "C" fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: u32) -> CUresult {
    answer(|layer| layer.set_flags(device, flags))
}

unsafe extern "C" fn cuCtxCreate_v2(context: *mut CUcontext, flags: u32, device: CUdevice) -> CUresult {
    // SAFETY: the caller's out parameter.
    answer(|layer| unsafe { put(context, layer.create_context(flags, device)?) })
}

unsafe extern "C" fn cuCtxDestroy_v2(context: CUcontext) -> CUresult {
    answer(|layer| layer.destroy_context(context))
}

unsafe extern "C" fn cuDeviceGetDevResource(device: CUdevice, resource: *mut CUdevResource, kind: u32) -> CUresult {
    // SAFETY: the caller's pointers go to the driver as they are.
    forward(device, |driver, real| unsafe { (driver.cuDeviceGetDevResource)(real, resource, kind) })
}

/// The virtual GPUs of one GPU share its multiprocessors, so none has some that could be set apart.
unsafe extern "C" fn cuGreenCtxCreate(_: *mut CUgreenCtx, _: u64, device: CUdevice, _: u32) -> CUresult {
    answer(|layer| layer.gpu(device).and(Err(CUDA_ERROR_NOT_SUPPORTED)))
}

unsafe extern "C" fn cuCtxEnablePeerAccess(peer: CUcontext, flags: u32) -> CUresult {
    answer(|layer| layer.enable_peer(peer, flags))
}

unsafe extern "C" fn cuCtxDisablePeerAccess(peer: CUcontext) -> CUresult {
    answer(|layer| layer.disable_peer(peer))
}

unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
    answer(|layer| {
        let memory = layer.memory()?;
        // SAFETY: the caller's out parameters.
        unsafe {
            put(free, memory.0)?;
            put(total, memory.1)
        }
    })
}

unsafe extern "C" fn cuMemCreate(
    handle: *mut c_void,
    size: usize,
    properties: *const CUmemAllocationProp,
    flags: u64,
) -> CUresult {
    let create = |layer: &Layer, properties| {
        // SAFETY: the caller's pointer goes to the driver as it is; the properties live through the call.
        unsafe { (layer.driver().cuMemCreate)(handle, size, properties, flags) }
    };
    // SAFETY: the caller's properties.
    unsafe { with_properties(properties, create) }
}

unsafe extern "C" fn cuMemGetAllocationGranularity(
    granularity: *mut usize,
    properties: *const CUmemAllocationProp,
    option: u32,
) -> CUresult {
    let ask = |layer: &Layer, properties| {
        // SAFETY: the caller's pointer goes to the driver as it is; the properties live through the call.
        unsafe { (layer.driver().cuMemGetAllocationGranularity)(granularity, properties, option) }
    };
    // SAFETY: the caller's properties.
    unsafe { with_properties(properties, ask) }
}

/// Makes a call about memory with these properties, with the driver's device in them.
///
/// # Safety
///
/// `properties` is null or valid for a read.
unsafe fn with_properties(
    properties: *const CUmemAllocationProp,
    ask: impl FnOnce(&Layer, *const CUmemAllocationProp) -> CUresult,
) -> CUresult {
    answer(|layer| {
        // SAFETY: the caller's promise.
        let properties = unsafe { properties.as_ref() }.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let properties = layer.properties(properties)?;
        match ask(layer, &raw const properties) {
            CUDA_SUCCESS => Ok(()),
            code => Err(code),
        }
    })
}

unsafe extern "C" fn cuMemMap(at: CUdeviceptr, size: usize, offset: usize, handle: u64, flags: u64) -> CUresult {
    answer(|layer| layer.map(at, size, offset, handle, flags))
}

unsafe extern "C" fn cuMemUnmap(at: CUdeviceptr, size: usize) -> CUresult {
    answer(|layer| layer.unmap(at, size))
}

unsafe extern "C" fn cuMemSetAccess(
    at: CUdeviceptr,
    size: usize,
    access: *const CUmemAccessDesc,
    count: usize,
) -> CUresult {
    answer(|layer| {
        if access.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, so as many as the caller says.
        layer.set_access(at, size, unsafe { std::slice::from_raw_parts(access, count) })
    })
}

unsafe extern "C" fn cuKernelGetAttribute(
    value: *mut i32,
    attribute: u32,
    kernel: CUkernel,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's pointers and handles go to the driver as they are.
    forward(device, |driver, real| unsafe { (driver.cuKernelGetAttribute)(value, attribute, kernel, real) })
}

unsafe extern "C" fn cuKernelSetAttribute(attribute: u32, value: i32, kernel: CUkernel, device: CUdevice) -> CUresult {
    // SAFETY: the caller's handle goes to the driver as it is.
    forward(device, |driver, real| unsafe { (driver.cuKernelSetAttribute)(attribute, value, kernel, real) })
}

unsafe extern "C" fn cuKernelSetCacheConfig(kernel: CUkernel, config: u32, device: CUdevice) -> CUresult {
    // SAFETY: the caller's handle goes to the driver as it is.
    forward(device, |driver, real| unsafe { (driver.cuKernelSetCacheConfig)(kernel, config, real) })
}

/// The driver demands a device of its own for each launch, and the attribute of virtual GPUs says that they do not have this.
unsafe extern "C" fn cuLaunchCooperativeKernelMultiDevice(_: *mut c_void, _: u32, _: u32) -> CUresult {
    CUDA_ERROR_NOT_SUPPORTED
}

#[cfg(test)]
mod tests {
    use rekindle_cuda_abi::table;

    use super::*;
    use crate::gpu::driver::CALLED;

    #[test]
    fn every_call_that_names_a_device_is_replaced() {
        let table = table::parse(table::TEXT).unwrap();
        const NAMES: [&str; 5] =
            ["CUdevice", "CUmemLocation", "CUmemAccessDesc", "CUmemAllocationProp", "CUmemPoolProps"];
        let names_device = |symbol: &&str| {
            let line = table.iter().find(|it| it.symbol == **symbol).unwrap();
            let types = line.params.iter().flatten().map(|it| it.c_type.trim_start_matches("const "));
            types.map(|it| it.trim_end_matches(['*', ' '])).any(|it| NAMES.contains(&it))
        };
        let naming: Vec<_> = CALLED.iter().copied().filter(names_device).collect();
        assert!(naming.len() > 15, "{naming:?}");
        let forgotten: Vec<_> = naming.into_iter().filter(|it| !REPLACED.contains(it)).collect();
        assert!(forgotten.is_empty(), "{forgotten:?}");
    }
}

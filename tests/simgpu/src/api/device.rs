//! Devices and their primary contexts.

use std::ffi::{c_char, c_void};

use rekindle_cuda_abi::arguments::{Out, Text};
use rekindle_cuda_abi::atomics;
use rekindle_cuda_abi::shapes::{CudaArray3dDescriptor, channel_bytes};
use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_VALUE, CUDA_SUCCESS, CUcontext, CUdevice,
    CUdevprop, CUresult,
};

use crate::attributes;
use crate::config::config;
use crate::contexts::{self, end_primary, primary};
use crate::device::{Device, device, devices};
use crate::status::{Result, ensure, put, put_text, status, utf8, values};

pub fn cuDeviceGet(out: Out<CUdevice>, ordinal: i32) -> CUresult {
    status(|| {
        device(ordinal)?;
        out.put(ordinal)
    })
}

pub fn cuDeviceGetCount(count: Out<i32>) -> CUresult {
    status(|| count.put(devices().len() as i32))
}

pub unsafe fn cuDeviceGetName(name: *mut c_char, len: i32, dev: CUdevice) -> CUresult {
    status(|| {
        device(dev)?;
        // SAFETY: null, or as much room as the caller says.
        unsafe { put_text(name, len, &crate::config::config().name) }
    })
}

pub fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, dev: CUdevice) -> CUresult {
    status(|| uuid.put(device(dev)?.uuid()))
}

pub fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, dev: CUdevice) -> CUresult {
    cuDeviceGetUuid_v2(uuid, dev)
}

pub fn cuDeviceGetAttribute(value: Out<i32>, attribute: u32, dev: CUdevice) -> CUresult {
    status(|| {
        device(dev)?;
        value.put(attributes::value(attribute, dev).ok_or(CUDA_ERROR_INVALID_VALUE)?)
    })
}

pub fn cuDeviceTotalMem_v2(bytes: Out<usize>, dev: CUdevice) -> CUresult {
    status(|| bytes.put(device(dev)?.memory.total as usize))
}

/// The answers are those of an H200: at most 2^30 elements, which take at most 4 GiB.
pub fn cuDeviceGetTexture1DLinearMaxWidth(elements: Out<usize>, format: u32, channels: u32, dev: CUdevice) -> CUresult {
    status(|| {
        device(dev)?;
        ensure(channel_bytes(format).is_some(), CUDA_ERROR_INVALID_VALUE)?;
        let descriptor = CudaArray3dDescriptor { format, channels, ..CudaArray3dDescriptor::default() };
        let element = descriptor.element().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        elements.put((1 << 30).min((1 << 32) / element))
    })
}

/// Writes what a link supports of each operation.
///
/// # Safety
/// The arrays are null, or have `count` elements.
unsafe fn put_capabilities(
    capabilities: *mut u32,
    operations: *const u32,
    count: u32,
    of: impl FnOnce() -> Result<fn(u32) -> u32>,
) -> CUresult {
    status(|| {
        ensure(!capabilities.is_null() && !operations.is_null() && count > 0, CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: not null, so as many as the caller says.
        let asked = unsafe { values(operations, count as usize) }?;
        ensure(asked.iter().all(|operation| *operation < atomics::OPERATIONS), CUDA_ERROR_INVALID_VALUE)?;
        let of = of()?;
        for (place, operation) in asked.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { put(capabilities.add(place), of(operation)) }?;
        }
        Ok(())
    })
}

/// As of a GPU on PCI Express: it has no atomic operations on the host's memory.
pub unsafe fn cuDeviceGetHostAtomicCapabilities(
    capabilities: *mut u32,
    operations: *const u32,
    count: u32,
    dev: CUdevice,
) -> CUresult {
    let of = || device(dev).map(|_| (|_| 0) as fn(u32) -> u32);
    // SAFETY: the caller's promise.
    unsafe { put_capabilities(capabilities, operations, count, of) }
}

/// Devices that reach each other do by their link what they do in their own memory.
pub unsafe fn cuDeviceGetP2PAtomicCapabilities(
    capabilities: *mut u32,
    operations: *const u32,
    count: u32,
    src: CUdevice,
    dst: CUdevice,
) -> CUresult {
    let of = || {
        ensure(device(src)?.ordinal != device(dst)?.ordinal, CUDA_ERROR_INVALID_DEVICE)?;
        Ok(if config().peers { atomics::in_own_memory } else { |_| 0 })
    };
    // SAFETY: the caller's promise.
    unsafe { put_capabilities(capabilities, operations, count, of) }
}

pub fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, dev: CUdevice) -> CUresult {
    status(|| {
        device(dev)?;
        let part = |attribute| attributes::value(attribute, dev).ok_or(CUDA_ERROR_INVALID_VALUE);
        major.put(part(75)?)?;
        minor.put(part(76)?)
    })
}

pub unsafe fn cuDeviceGetProperties(properties: *mut c_void, dev: CUdevice) -> CUresult {
    status(|| {
        device(dev)?;
        let of = |number| Ok::<_, CUresult>(attributes::value(number, dev).unwrap_or(0));
        let answer = CUdevprop::new(of)?;
        // SAFETY: null, or room for properties by the caller's promise.
        unsafe { put(properties.cast(), answer) }
    })
}

fn bus_id(device: &Device) -> String {
    let [domain, bus, slot] = device.pci();
    format!("{domain:04x}:{bus:02x}:{slot:02x}.0")
}

pub unsafe fn cuDeviceGetPCIBusId(out: *mut c_char, len: i32, dev: CUdevice) -> CUresult {
    let id = device(dev).map(bus_id);
    // SAFETY: null, or as much room as the caller says.
    status(|| unsafe { put_text(out, len, &id?) })
}

pub fn cuDeviceGetByPCIBusId(out: Out<CUdevice>, id: Text) -> CUresult {
    status(|| {
        let id = utf8(id)?.to_ascii_lowercase();
        let formed = !id.is_empty() && id.chars().all(|c| c.is_ascii_hexdigit() || ":.".contains(c));
        ensure(formed, CUDA_ERROR_INVALID_VALUE)?;
        // Domain and function may be left out of the address.
        let found = devices().iter().find(|device| {
            let full = bus_id(device);
            let short = full.trim_end_matches(".0");
            full == id || short == id || full[5..] == id || short[5..] == id
        });
        out.put(found.ok_or(CUDA_ERROR_INVALID_DEVICE)?.ordinal as CUdevice)
    })
}

pub fn cuDeviceCanAccessPeer(can: Out<i32>, dev: CUdevice, peer: CUdevice) -> CUresult {
    status(|| {
        let other = device(dev)?.ordinal != device(peer)?.ordinal;
        can.put(i32::from(other && config().peers))
    })
}

pub fn cuDeviceGetP2PAttribute(value: Out<i32>, attribute: u32, src: CUdevice, dst: CUdevice) -> CUresult {
    status(|| {
        ensure(device(src)?.ordinal != device(dst)?.ordinal, CUDA_ERROR_INVALID_DEVICE)?;
        let answer = match attribute {
            // Supported: rank, access, atomics. Not supported: arrays.
            1 => 0,
            2 | 3 => i32::from(config().peers),
            4 | 5 => 0,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        value.put(answer)
    })
}

pub fn cuDevicePrimaryCtxRetain(out: Out<CUcontext>, dev: CUdevice) -> CUresult {
    status(|| {
        let device = device(dev)?;
        out.require()?;
        contexts::retain(device)?;
        out.put(device.primary)
    })
}

pub fn cuDevicePrimaryCtxRelease_v2(dev: CUdevice) -> CUresult {
    status(|| {
        let device = device(dev)?;
        let mut primary = primary(device);
        primary.retained = primary.retained.checked_sub(1).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        if primary.retained == 0 {
            drop(primary);
            end_primary(device);
        }
        Ok(())
    })
}

/// The first version allows one release too many, without an effect.
pub fn cuDevicePrimaryCtxRelease(dev: CUdevice) -> CUresult {
    match cuDevicePrimaryCtxRelease_v2(dev) {
        CUDA_ERROR_INVALID_CONTEXT => CUDA_SUCCESS,
        result => result,
    }
}

/// Programs that have retained the context keep it; it is active again when it is next retained.
pub fn cuDevicePrimaryCtxReset_v2(dev: CUdevice) -> CUresult {
    status(|| {
        let device = device(dev)?;
        primary(device).retained = 0;
        end_primary(device);
        crate::stream_ordered::reset(device);
        Ok(())
    })
}

pub fn cuDevicePrimaryCtxReset(dev: CUdevice) -> CUresult {
    cuDevicePrimaryCtxReset_v2(dev)
}

pub fn cuDevicePrimaryCtxSetFlags_v2(dev: CUdevice, flags: u32) -> CUresult {
    status(|| {
        super::context::check_flags(flags)?;
        let mut primary = primary(device(dev)?);
        primary.flags = flags;
        if let Some(context) = &primary.active {
            context.flags.store(flags, std::sync::atomic::Ordering::Relaxed);
        }
        Ok(())
    })
}

pub fn cuDevicePrimaryCtxSetFlags(dev: CUdevice, flags: u32) -> CUresult {
    cuDevicePrimaryCtxSetFlags_v2(dev, flags)
}

pub fn cuDevicePrimaryCtxGetState(dev: CUdevice, flags: Out<u32>, active: Out<i32>) -> CUresult {
    status(|| {
        let primary = primary(device(dev)?);
        flags.put_if(primary.flags);
        active.put_if(i32::from(primary.active.is_some()));
        Ok(())
    })
}

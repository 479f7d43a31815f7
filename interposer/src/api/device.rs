//! Start-up and devices: all answered from what the worker said when the process attached.

use std::ffi::{CStr, c_char, c_void};

use rekindle_cuda_abi::raw::put_text;
use rekindle_cuda_abi::types::*;
use rekindle_wire::attach::Device;

use super::{code, put};
use crate::start;
use crate::state::client;

pub(crate) unsafe fn cuInit(flags: u32) -> CUresult {
    if flags != 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    start::initialise()
}

pub(crate) unsafe fn cuDriverGetVersion(version: *mut i32) -> CUresult {
    // Asked before cuInit, and even where cuInit will fail: that says why, and a version of 0 would be taken for the
    // reason.
    let known = match start::try_attached(false) {
        Ok(client) => client.devices.driver_version(),
        Err(_) => TABLE_VERSION,
    };
    // SAFETY: the caller's promise by cuda.h.
    code(unsafe { put(version, known) })
}

/// The version of the driver that the table of functions was read off.
const TABLE_VERSION: i32 = 13_000;

fn device(ordinal: CUdevice) -> Result<&'static Device, CUresult> {
    let client = client::get()?;
    client.devices.of_ordinal(ordinal)
}

fn attribute(device: &Device, attribute: u32) -> Result<i32, CUresult> {
    match device.attributes.get(attribute as usize) {
        Some(&(CUDA_SUCCESS, value)) => Ok(value),
        Some(&(error, _)) => Err(error),
        None => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

pub(crate) unsafe fn cuDeviceGetCount(count: *mut i32) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(client::get().and_then(|c| unsafe { put(count, c.devices.visible().len() as i32) }))
}

pub(crate) unsafe fn cuDeviceGet(out: *mut CUdevice, ordinal: i32) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(client::get().and_then(|c| c.devices.number(ordinal)).and_then(|_| unsafe { put(out, ordinal) }))
}

pub(crate) unsafe fn cuDeviceGetName(name: *mut c_char, len: i32, dev: CUdevice) -> CUresult {
    let d = match device(dev) {
        Ok(d) => d,
        Err(error) => return error,
    };
    // SAFETY: cuda.h has `name` hold `len` bytes.
    code(unsafe { put_text(name, len, &d.name) })
}

pub(crate) unsafe fn cuDeviceGetUuid(uuid: *mut [u8; 16], dev: CUdevice) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(device(dev).and_then(|d| unsafe { put(uuid, d.uuid) }))
}

pub(crate) unsafe fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], dev: CUdevice) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuDeviceGetUuid(uuid, dev) }
}

pub(crate) unsafe fn cuDeviceTotalMem_v2(bytes: *mut usize, dev: CUdevice) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(device(dev).and_then(|d| unsafe { put(bytes, d.memory as usize) }))
}

/// `CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM`: the device knows registered memory by another
/// address.
const CAN_USE_HOST_POINTER: u32 = 91;

/// Attributes of what the interposer does not offer, answered 0: pageable memory access (88, 100), managed memory that the
/// program and the GPU may use at once (89: they may, but slowly), handles of memory for other processes (103, 128), sparse arrays
/// (112) and arrays whose memory comes later (121), semaphores of other interfaces (114), other devices that use a program's memory
/// (116, and the flush of what they have written, 117) or get it as a file (124, and memory of the host, 146), functions that have
/// one address on the host and the device (129), multicast (132), graphics (135, 138), decompression by an engine of the device's
/// (136, 137), pools on the host (142, 144), virtual memory on the host (141, 145).
const NOT_OFFERED: &[u32] =
    &[88, 89, 100, 103, 112, 114, 116, 117, 121, 124, 128, 129, 132, 135, 136, 137, 138, 141, 142, 144, 145, 146];
/// `CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES`: pools are exported as files alone.
const POOL_HANDLE_TYPES: u32 = 119;

pub(crate) unsafe fn cuDeviceGetAttribute(pi: *mut i32, attrib: u32, dev: CUdevice) -> CUresult {
    code(device(dev).and_then(|d| {
        let value = attribute(d, attrib)?;
        let hidden = attrib == CAN_USE_HOST_POINTER || NOT_OFFERED.contains(&attrib);
        let value = match attrib {
            POOL_HANDLE_TYPES => value & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR as i32,
            _ if hidden => 0,
            _ => value,
        };
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(pi, value) }
    }))
}

pub(crate) unsafe fn cuDeviceComputeCapability(major: *mut i32, minor: *mut i32, dev: CUdevice) -> CUresult {
    code(device(dev).and_then(|d| {
        // SAFETY: the caller's promise by cuda.h.
        unsafe {
            put(major, attribute(d, 75)?)?;
            put(minor, attribute(d, 76)?)
        }
    }))
}

pub(crate) unsafe fn cuDeviceGetProperties(prop: *mut c_void, dev: CUdevice) -> CUresult {
    code(device(dev).and_then(|d| {
        let properties = CUdevprop::new(|number| attribute(d, number))?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(prop.cast::<CUdevprop>(), properties) }
    }))
}

pub(crate) unsafe fn cuDeviceGetPCIBusId(out: *mut c_char, len: i32, dev: CUdevice) -> CUresult {
    let d = match device(dev) {
        Ok(d) => d,
        Err(error) => return error,
    };
    // SAFETY: cuda.h has the buffer hold `len` bytes.
    code(unsafe { put_text(out, len, &d.pci_bus_id) })
}

pub(crate) unsafe fn cuDeviceGetByPCIBusId(dev: *mut CUdevice, pci_bus_id: *const c_char) -> CUresult {
    if pci_bus_id.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, so a C string by the caller's promise.
    let wanted = unsafe { CStr::from_ptr(pci_bus_id) }.to_string_lossy().to_ascii_lowercase();
    if wanted.is_empty() || wanted.contains(|c: char| !c.is_ascii_hexdigit() && !":.".contains(c)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    code(client::get().and_then(|c| {
        let found = c.devices.visible().position(|device| {
            let id = device.pci_bus_id.to_ascii_lowercase();
            id == wanted || id.trim_start_matches('0') == wanted.trim_start_matches('0') || id.ends_with(&wanted)
        });
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(dev, found.ok_or(CUDA_ERROR_INVALID_DEVICE)? as CUdevice) }
    }))
}

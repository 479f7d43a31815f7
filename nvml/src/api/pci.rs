//! The PCI addresses of GPUs.

use std::ffi::{c_char, c_void};

use rekindle_wire::nvml::Gpu;

use super::{device, given, put};
use crate::result::*;
use crate::{Answered, state};

/// `domain:bus:device`; the function is always 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Address {
    domain: u32,
    bus: u32,
    device: u32,
}

/// Reads `[domain:]bus:device[.function]`, hexadecimal.
fn parse(text: &str) -> Option<Address> {
    let (place, function) = text.split_once('.').unwrap_or((text, "0"));
    u32::from_str_radix(function, 16).ok()?;
    let mut numbers = place.rsplit(':').map(|word| u32::from_str_radix(word, 16));
    let device = numbers.next()?.ok()?;
    let bus = numbers.next()?.ok()?;
    let domain = numbers.next().unwrap_or(Ok(0)).ok()?;
    numbers.next().is_none().then_some(Address { domain, bus, device })
}

fn address(gpu: &Gpu) -> Result<Address, u32> {
    parse(&gpu.pci_bus_id).ok_or(ERROR_NOT_SUPPORTED)
}

pub(crate) unsafe fn nvmlDeviceGetHandleByPciBusId(id: *const c_char, device: *mut usize) -> Answered {
    state::facts()?;
    // SAFETY: the caller's promise by nvml.h.
    let wanted = parse(unsafe { given(id)? }).ok_or(ERROR_INVALID_ARGUMENT)?;
    // SAFETY: the caller's promise by nvml.h.
    unsafe { device::find(device, |gpu| parse(&gpu.pci_bus_id) == Some(wanted)) }
}

pub(crate) unsafe fn nvmlDeviceGetHandleByPciBusId_v2(id: *const c_char, device: *mut usize) -> Answered {
    // SAFETY: the caller's promise by nvml.h.
    unsafe { nvmlDeviceGetHandleByPciBusId(id, device) }
}

/// The beginning that all versions of `nvmlPciInfo_t` have.
#[repr(C)]
struct PciV1 {
    bus_id: [u8; 16],
    domain: u32,
    bus: u32,
    device: u32,
    pci_device: u32,
}

/// `nvmlPciInfo_v2_t` has this, and words that are reserved.
#[repr(C)]
struct PciV2 {
    first: PciV1,
    pci_subsystem: u32,
}

/// `nvmlPciInfo_t` of today.
#[repr(C)]
struct PciV3 {
    first: PciV2,
    bus_id: [u8; 32],
}

/// `nvmlPciInfoExt_v1_t`.
#[repr(C)]
struct PciExt {
    version: u32,
    domain: u32,
    bus: u32,
    device: u32,
    pci_device: u32,
    pci_subsystem: u32,
    base_class: u32,
    sub_class: u32,
    bus_id: [u8; 32],
}

const EXT_VERSION: u32 = 1 << 24 | size_of::<PciExt>() as u32;
/// A 3D controller, the class of GPUs for computing.
const BASE_CLASS: u32 = 0x03;
const SUB_CLASS: u32 = 0x02;

fn filled<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    for (byte, from) in bytes.iter_mut().zip(text.bytes().take(N - 1)) {
        *byte = from;
    }
    bytes
}

fn info(handle: usize) -> Result<PciV3, u32> {
    let facts = state::facts()?;
    let (_, gpu) = facts.gpu(handle)?;
    let Address { domain, bus, device } = address(gpu)?;
    let first = PciV1 {
        bus_id: filled(&format!("{domain:04X}:{bus:02X}:{device:02X}.0")),
        domain,
        bus,
        device,
        pci_device: gpu.pci_device.unwrap_or(0),
    };
    Ok(PciV3 {
        first: PciV2 { first, pci_subsystem: gpu.pci_subsystem.unwrap_or(0) },
        bus_id: filled(&format!("{domain:08X}:{bus:02X}:{device:02X}.0")),
    })
}

pub(crate) unsafe fn nvmlDeviceGetPciInfo(device: usize, pci: *mut c_void) -> Answered {
    // SAFETY: the caller's promise by nvml.h, of its first version.
    unsafe { put(pci.cast(), info(device)?.first.first) }
}

pub(crate) unsafe fn nvmlDeviceGetPciInfo_v2(device: usize, pci: *mut c_void) -> Answered {
    // SAFETY: the caller's promise by nvml.h, of its second version.
    unsafe { put(pci.cast(), info(device)?.first) }
}

pub(crate) unsafe fn nvmlDeviceGetPciInfo_v3(device: usize, pci: *mut c_void) -> Answered {
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put(pci.cast(), info(device)?) }
}

pub(crate) unsafe fn nvmlDeviceGetPciInfoExt(device: usize, pci: *mut c_void) -> Answered {
    let PciV3 { first: PciV2 { first, pci_subsystem }, bus_id } = info(device)?;
    if pci.is_null() {
        return Err(ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: not null, so a structure that begins with its version by the caller's promise.
    if unsafe { pci.cast::<u32>().read_unaligned() } != EXT_VERSION {
        return Err(ERROR_ARGUMENT_VERSION_MISMATCH);
    }
    let ext = PciExt {
        version: EXT_VERSION,
        domain: first.domain,
        bus: first.bus,
        device: first.device,
        pci_device: first.pci_device,
        pci_subsystem,
        base_class: BASE_CLASS,
        sub_class: SUB_CLASS,
        bus_id,
    };
    // SAFETY: of this version, so all of it is there.
    unsafe { put(pci.cast(), ext) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_accepts_all_forms_of_an_address() {
        let wanted = Some(Address { domain: 0, bus: 0x3b, device: 0 });
        for text in ["0000:3b:00.0", "00000000:3B:00.0", "3b:00", "0:3B:0.0"] {
            assert_eq!(parse(text), wanted, "{text}");
        }
        assert_eq!(parse("1:2:3.0"), Some(Address { domain: 1, bus: 2, device: 3 }));
        for text in ["", "3b", "x:0", "0:0:0:0", "0:0.x"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn structures_are_of_the_sizes_of_nvml_h() {
        assert_eq!((size_of::<PciV1>(), size_of::<PciV2>(), size_of::<PciV3>()), (32, 36, 68));
        assert_eq!(size_of::<PciExt>(), 64);
    }
}

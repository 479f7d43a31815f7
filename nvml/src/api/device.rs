//! The GPUs, and their properties as the CUDA driver reports them.

use std::ffi::{c_char, c_void};

use rekindle_wire::gpus;
use rekindle_wire::nvml::Gpu;

use super::{given, put, put_text};
use crate::result::*;
use crate::{Answered, state};

/// `CUdevice_attribute`.
const MEMORY_BUS_WIDTH: usize = 37;
const CAPABILITY_MAJOR: usize = 75;
const CAPABILITY_MINOR: usize = 76;

pub(crate) unsafe fn nvmlDeviceGetCount(count: *mut u32) -> Answered {
    let facts = state::facts()?;
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put(count, facts.0.gpus.len() as u32) }
}

pub(crate) unsafe fn nvmlDeviceGetCount_v2(count: *mut u32) -> Answered {
    // SAFETY: the caller's promise by nvml.h.
    unsafe { nvmlDeviceGetCount(count) }
}

pub(crate) unsafe fn nvmlDeviceGetHandleByIndex(index: u32, device: *mut usize) -> Answered {
    let facts = state::facts()?;
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put(device, facts.handle(index as usize)?) }
}

pub(crate) unsafe fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut usize) -> Answered {
    // SAFETY: the caller's promise by nvml.h.
    unsafe { nvmlDeviceGetHandleByIndex(index, device) }
}

/// The handle of the first GPU for which `is` returns true.
///
/// # Safety
/// `device` is null or may be written.
pub(super) unsafe fn find(device: *mut usize, is: impl Fn(&Gpu) -> bool) -> Answered {
    let facts = state::facts()?;
    let place = facts.0.gpus.iter().position(is).ok_or(ERROR_NOT_FOUND)?;
    // SAFETY: the caller's promise.
    unsafe { put(device, facts.handle(place)?) }
}

pub(crate) unsafe fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut usize) -> Answered {
    state::facts()?;
    // SAFETY: the caller's promise by nvml.h.
    let wanted = unsafe { given(uuid)? };
    // SAFETY: the caller's promise by nvml.h.
    unsafe { find(device, |gpu| gpus::name(&gpu.uuid).eq_ignore_ascii_case(wanted)) }
}

/// `nvmlUUID_t`: text or bytes.
#[repr(C)]
struct Uuid {
    version: u32,
    kind: u32,
    value: [u8; 41],
}

const UUID_VERSION: u32 = 1 << 24 | size_of::<Uuid>() as u32;
const UUID_TEXT: u32 = 1;
const UUID_BYTES: u32 = 2;

pub(crate) unsafe fn nvmlDeviceGetHandleByUUIDV(uuid: *mut c_void, device: *mut usize) -> Answered {
    state::facts()?;
    if uuid.is_null() {
        return Err(ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: not null, so a structure that begins with its version by the caller's promise.
    if unsafe { uuid.cast::<u32>().read_unaligned() } != UUID_VERSION {
        return Err(ERROR_ARGUMENT_VERSION_MISMATCH);
    }
    // SAFETY: of this version, so all of it is there.
    let Uuid { kind, value, .. } = unsafe { uuid.cast::<Uuid>().read_unaligned() };
    let text = String::from_utf8_lossy(value.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned();
    let is = |gpu: &Gpu| match kind {
        UUID_TEXT => gpus::name(&gpu.uuid).eq_ignore_ascii_case(&text),
        _ => value.starts_with(&gpu.uuid),
    };
    if !matches!(kind, UUID_TEXT | UUID_BYTES) {
        return Err(ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: the caller's promise by nvml.h.
    unsafe { find(device, is) }
}

pub(crate) unsafe fn nvmlDeviceGetName(device: usize, name: *mut c_char, length: u32) -> Answered {
    let facts = state::facts()?;
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put_text(name, length, &facts.gpu(device)?.1.name) }
}

pub(crate) unsafe fn nvmlDeviceGetUUID(device: usize, uuid: *mut c_char, length: u32) -> Answered {
    let facts = state::facts()?;
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put_text(uuid, length, &gpus::name(&facts.gpu(device)?.1.uuid)) }
}

pub(crate) unsafe fn nvmlDeviceGetIndex(device: usize, index: *mut u32) -> Answered {
    let facts = state::facts()?;
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put(index, facts.gpu(device)?.0) }
}

pub(crate) unsafe fn nvmlDeviceGetMinorNumber(device: usize, minor: *mut u32) -> Answered {
    let facts = state::facts()?;
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put(minor, facts.gpu(device)?.1.minor.ok_or(ERROR_NOT_SUPPORTED)?) }
}

fn attribute(gpu: &Gpu, number: usize) -> Result<i32, u32> {
    match gpu.attributes.get(number) {
        Some((0, value)) => Ok(*value),
        _ => Err(ERROR_NOT_SUPPORTED),
    }
}

pub(crate) unsafe fn nvmlDeviceGetCudaComputeCapability(device: usize, major: *mut i32, minor: *mut i32) -> Answered {
    let facts = state::facts()?;
    let (_, gpu) = facts.gpu(device)?;
    if minor.is_null() {
        return Err(ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: the caller's promise by nvml.h.
    unsafe {
        put(major, attribute(gpu, CAPABILITY_MAJOR)?)?;
        put(minor, attribute(gpu, CAPABILITY_MINOR)?)
    }
}

/// `NVML_DEVICE_ARCH_*` of a compute capability.
fn architecture(major: i32, minor: i32) -> u32 {
    match (major, minor) {
        (3, _) => 2,
        (5, _) => 3,
        (6, _) => 4,
        (7, 0..=4) => 5,
        (7, _) => 6,
        (8, 9) => 8,
        (8, _) => 7,
        (9, _) => 9,
        (10.., _) => 10,
        _ => u32::MAX,
    }
}

pub(crate) unsafe fn nvmlDeviceGetArchitecture(device: usize, arch: *mut c_void) -> Answered {
    let facts = state::facts()?;
    let (_, gpu) = facts.gpu(device)?;
    let arch_of = architecture(attribute(gpu, CAPABILITY_MAJOR)?, attribute(gpu, CAPABILITY_MINOR)?);
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put(arch.cast(), arch_of) }
}

pub(crate) unsafe fn nvmlDeviceGetMemoryBusWidth(device: usize, width: *mut u32) -> Answered {
    let facts = state::facts()?;
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put(width, attribute(facts.gpu(device)?.1, MEMORY_BUS_WIDTH)? as u32) }
}

/// Processes see whole GPUs only.
pub(crate) unsafe fn nvmlDeviceIsMigDeviceHandle(device: usize, is_mig: *mut u32) -> Answered {
    let facts = state::facts()?;
    facts.gpu(device)?;
    // SAFETY: the caller's promise by nvml.h.
    unsafe { put(is_mig, 0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_those_of_nvml_h() {
        let known =
            [(3, 5, 2), (5, 2, 3), (6, 1, 4), (7, 0, 5), (7, 5, 6), (8, 0, 7), (8, 9, 8), (9, 0, 9), (10, 0, 10)];
        for (major, minor, arch) in known {
            assert_eq!(architecture(major, minor), arch, "{major}.{minor}");
        }
        assert_eq!(architecture(2, 0), u32::MAX);
    }
}

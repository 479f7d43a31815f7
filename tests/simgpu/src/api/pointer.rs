//! The attributes of addresses.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUdeviceptr, CUresult};

use crate::current;
use crate::device::devices;
use crate::memory::space::{self, Kind, Region};
use crate::memory::vmm;
use crate::status::{Result, ensure, put, status};

/// An attribute's value, and how many bytes C reserves for it.
struct Value {
    bits: u64,
    bytes: usize,
}

const HOST: u64 = 1;
const DEVICE: u64 = 2;

/// `CU_DEVICE_INVALID`.
const NO_DEVICE: i32 = -2;

/// The value of `CU_POINTER_ATTRIBUTE_*` for an address, in known memory or not.
fn value(attribute: u32, pointer: u64, region: Option<&Region>) -> Result<Value> {
    let of = |get: &dyn Fn(&Region) -> u64| region.map_or(0, get);
    let pool_of = |r: &Region| devices().get(r.device).and_then(|d| d.pools.pool_of(r.base));
    let pool = |r: &Region| pool_of(r).map_or(0, |pool| pool.handle);
    let handle_types = |r: &Region| match r.kind {
        Kind::Mapped => 1,
        _ => pool_of(r).map_or(0, |pool| pool.handle_types.into()),
    };
    let (bits, bytes) = match attribute {
        1 => (of(&|r| r.context), 8),
        // Managed memory counts as the device's here.
        2 => (of(&|r| if r.kind.is_host() && !r.kind.is_managed() { HOST } else { DEVICE }), 4),
        3 => (of(&|_| pointer), 8),
        4 => (of(&|r| if r.kind.is_host() { pointer } else { 0 }), 8),
        5 => return Err(CUDA_ERROR_NOT_SUPPORTED),
        6 => (of(&|r| synchronous().contains(&r.id).into()), 4),
        7 | 20 => (of(&|r| r.id), 8),
        8 => (of(&|r| u64::from(r.kind.is_managed())), 4),
        9 => (region.map_or(NO_DEVICE, |r| r.device as i32) as u32 as u64, 4),
        10 => (0, 4),
        11 => (of(&|r| vmm::reservation_at(r.base).map_or(r.base, |v| v.0)), 8),
        12 => (of(&|r| vmm::reservation_at(r.base).map_or(r.len, |v| v.1)), 8),
        13 => (of(&|_| 1), 4),
        14 => (of(&handle_types), 8),
        15 => (0, 4),
        16 => (of(&|_| 3), 4),
        17 => (of(&pool), 8),
        18 => (of(&|r| r.len), 8),
        19 => (of(&|r| r.base), 8),
        21 => (0, 4),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    Ok(Value { bits, bytes })
}

/// Writes a value where the caller wants it.
///
/// # Safety
///
/// `out` must be null or have room for the value.
unsafe fn write(out: *mut c_void, value: &Value) -> Result<()> {
    match value.bytes {
        // SAFETY: the caller's promise.
        4 => unsafe { put(out.cast(), value.bits as u32) },
        // SAFETY: the caller's promise.
        _ => unsafe { put(out.cast(), value.bits) },
    }
}

pub unsafe fn cuPointerGetAttribute(data: *mut c_void, attribute: u32, pointer: CUdeviceptr) -> CUresult {
    status(|| {
        let region = space::find(pointer).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // Device memory has no host pointer.
        ensure(attribute != 4 || region.kind.is_host(), CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: null or room for this attribute, by the caller's promise.
        unsafe { write(data, &value(attribute, pointer, Some(&region))?) }
    })
}

/// For unknown memory the results are defaults, without an error.
pub unsafe fn cuPointerGetAttributes(
    count: u32,
    attributes: *mut u32,
    data: *mut *mut c_void,
    pointer: CUdeviceptr,
) -> CUresult {
    status(|| {
        ensure(count > 0 && !attributes.is_null() && !data.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let region = space::find(pointer);
        for i in 0..count as usize {
            // SAFETY: not null, so of that many elements, each with room for its attribute.
            unsafe { write(*data.add(i), &value(*attributes.add(i), pointer, region.as_ref())?) }?;
        }
        Ok(())
    })
}

/// Allocations with `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`, by their ids. Copies here never return before the host's part is done,
/// with the attribute or without.
fn synchronous() -> MutexGuard<'static, BTreeSet<u64>> {
    static SYNCHRONOUS: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());
    SYNCHRONOUS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub unsafe fn cuPointerSetAttribute(value: *const c_void, attribute: u32, pointer: CUdeviceptr) -> CUresult {
    status(|| {
        current::healthy()?;
        ensure(attribute == 6 && !value.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let region = space::find(pointer).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: not null, so a number by the caller's promise.
        let wanted = unsafe { value.cast::<u32>().read_unaligned() } != 0;
        let mut all = synchronous();
        if wanted {
            all.insert(region.id)
        } else {
            all.remove(&region.id)
        };
        Ok(())
    })
}

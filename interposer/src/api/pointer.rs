//! Attributes of addresses.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;

use super::code;
use crate::call::standing_error;
use crate::state::client::{self, Client};
use crate::state::memory::Allocation;

/// All attributes.
const ATTRIBUTES: std::ops::RangeInclusive<u32> = 1..=21;
const SYNC_MEMOPS: u32 = 6;
const MEMORY_HOST: u32 = 1;
const MEMORY_DEVICE: u32 = 2;

/// Writes one attribute (`CUpointer_attribute`) of an address.
///
/// # Safety
/// `data` has room for the attribute's type.
unsafe fn write(data: *mut c_void, attribute: u32, address: u64) -> Result<(), CUresult> {
    if data.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let client = client::get()?;
    // The driver returns CUDA_ERROR_INVALID_VALUE for ordinary host memory; only `mapped` (13) has a value for it.
    let Some(allocation) = client.memory.at(address) else {
        if attribute == 13 {
            // SAFETY: the caller's promise.
            unsafe { data.cast::<u32>().write(0) };
            return Ok(());
        }
        return Err(CUDA_ERROR_INVALID_VALUE);
    };
    let range = allocation.range();
    let host = allocation.is_host();
    let managed = matches!(allocation, Allocation::Managed { .. });
    // For memory that the program has mapped itself, this is its reservation.
    let reserved = match allocation {
        Allocation::Mapping { base, .. } => client.vmm.reservation(base),
        _ => None,
    };
    let reserved = reserved.unwrap_or((range.start, range.end - range.start));
    // Booleans take four bytes: the runtime reads as many.
    // SAFETY: each arm writes the type that cuda.h gives the attribute, for which the caller has room.
    unsafe {
        match attribute {
            1 => data.cast::<u64>().write(allocation.context()),
            // Managed memory counts as the device's here, and has a host pointer, too.
            2 => data.cast::<u32>().write(if host && !managed { MEMORY_HOST } else { MEMORY_DEVICE }),
            3 => match client.memory.reached_at(address, 1) {
                Some(at) => data.cast::<u64>().write(at),
                None => return Err(CUDA_ERROR_INVALID_VALUE),
            },
            4 if host => data.cast::<u64>().write(match allocation {
                Allocation::Mapped { base, host, .. } => host + (address - base),
                _ => address,
            }),
            SYNC_MEMOPS => data.cast::<u32>().write(u32::from(client.memory.is_synchronous(address))),
            7 | 20 => data.cast::<u64>().write(client.memory.id(address).ok_or(CUDA_ERROR_INVALID_VALUE)?),
            8 => data.cast::<u32>().write(u32::from(managed)),
            9 => data.cast::<i32>().write(ordinal(client, &allocation)),
            10 | 15 | 21 => data.cast::<u32>().write(0),
            11 => data.cast::<u64>().write(reserved.0),
            12 => data.cast::<u64>().write(reserved.1),
            19 => data.cast::<u64>().write(range.start),
            18 => data.cast::<u64>().write(range.end - range.start),
            13 => data.cast::<u32>().write(1),
            14 => data.cast::<u64>().write(match allocation {
                Allocation::Mapping { handle_types, .. } => u64::from(handle_types),
                Allocation::Pooled { pool, .. } => u64::from(client.pools.lock().handle_types(pool)),
                _ => 0,
            }),
            16 => data.cast::<u32>().write(3),
            17 => data.cast::<u64>().write(match allocation {
                Allocation::Pooled { pool, .. } => pool,
                _ => 0,
            }),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
    Ok(())
}

fn ordinal(client: &Client, allocation: &Allocation) -> i32 {
    let of_context = || client.contexts.get(allocation.context()).map(|c| c.device);
    let device = allocation.device().or_else(of_context);
    device.map_or(-1, |d| client.devices.ordinal(d))
}

pub(crate) unsafe fn cuPointerGetAttribute(data: *mut c_void, attribute: u32, ptr: CUdeviceptr) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(unsafe { write(data, attribute, ptr) })
}

pub(crate) unsafe fn cuPointerGetAttributes(
    count: u32,
    attributes: *mut u32,
    data: *mut *mut c_void,
    ptr: CUdeviceptr,
) -> CUresult {
    if count == 0 || attributes.is_null() || data.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for i in 0..count as usize {
        // SAFETY: cuda.h has both arrays hold `count` elements, and each place have room for its attribute.
        unsafe {
            let (attribute, place) = (*attributes.add(i), *data.add(i));
            if !ATTRIBUTES.contains(&attribute) {
                return CUDA_ERROR_INVALID_VALUE;
            }
            if write(place, attribute, ptr) == Err(CUDA_ERROR_INVALID_VALUE) && !place.is_null() {
                // Not an error here: the driver gives what means "none".
                match attribute {
                    2 => place.cast::<u32>().write(0),
                    9 => place.cast::<i32>().write(-2),
                    8 | 13 => place.cast::<u32>().write(0),
                    1 | 3 | 4 | 7 | 11 | 12 => place.cast::<u64>().write(0),
                    _ => {}
                }
            }
        }
    }
    code(client::get().map(|_| ()))
}

/// The one attribute that can be set makes copies and memsets without stream wait where they else need not.
pub(crate) unsafe fn cuPointerSetAttribute(value: *const c_void, attribute: u32, ptr: CUdeviceptr) -> CUresult {
    let set = || {
        let client = client::get()?;
        client.contexts.current()?;
        standing_error(client)?;
        if value.is_null() || attribute != SYNC_MEMOPS {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and an unsigned int by cuda.h.
        let wanted = unsafe { value.cast::<u32>().read_unaligned() } != 0;
        if client.memory.set_synchronous(ptr, wanted) { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    };
    code(set())
}

//! Mipmapped arrays. Their levels are arrays, whose handles are chosen when the whole is made.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{ArrayDestroy, Kind, MIPMAP_CREATE, MIPMAP_DESTROY, MipmapCreate};

use super::array::{ensure_supported, size_of};
use super::{check, code, put};
use crate::call::{Call, perform};
use crate::state::arrays::{Array, Mipmapped};
use crate::state::client;

fn create(out: *mut CUmipmappedArray, desc: CudaArray3dDescriptor, levels: u32) -> Result<(), CUresult> {
    let client = client::get()?;
    let (context, _) = client.contexts.current()?;
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    ensure_supported("cuMipmappedArrayCreate", &desc)?;
    // The driver makes no more levels than the size has.
    let count = levels.clamp(1, desc.most_levels());
    let mut call = Call::in_context(MIPMAP_CREATE)?;
    let handle = client.fresh(Kind::MipmappedArray);
    let arrays: Vec<CUarray> = (0..count).map(|_| client.fresh(Kind::Array)).collect();
    let (size, format, channels, flags) = (size_of(&desc), desc.format, desc.channels, desc.flags);
    call.put(&MipmapCreate { mipmapped: handle, size, format, channels, flags, levels: arrays.clone() });
    check(call.wait().0)?;
    for (level, array) in (0..).zip(&arrays) {
        client.arrays.insert(*array, Array { desc: desc.level(level), context, level: true });
    }
    client.arrays.insert_mipmapped(handle, Mipmapped { levels: arrays, context });
    // SAFETY: not null, so writable by cuda.h's contract.
    unsafe { put(out, handle) }
}

pub(crate) unsafe fn cuMipmappedArrayCreate(
    out: *mut CUmipmappedArray,
    desc: *const CudaArray3dDescriptor,
    levels: u32,
) -> CUresult {
    if desc.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, so readable by cuda.h's contract.
    code(create(out, unsafe { *desc }, levels))
}

pub(crate) unsafe fn cuMipmappedArrayGetLevel(out: *mut CUarray, array: CUmipmappedArray, level: u32) -> CUresult {
    code(client::get().and_then(|client| {
        let mipmapped = client.arrays.mipmapped(array)?;
        let level = mipmapped.levels.get(level as usize).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(out, *level) }
    }))
}

pub(crate) unsafe fn cuMipmappedArrayDestroy(array: CUmipmappedArray) -> CUresult {
    code(client::get().and_then(|client| {
        let known = client.arrays.mipmapped(array)?;
        perform(MIPMAP_DESTROY, &ArrayDestroy { array })?;
        client.arrays.remove_mipmapped(array, &known);
        Ok(())
    }))
}

/// The answer of two functions for kinds of arrays that are not supported: for any other array the driver returns this error.
fn of_another_kind(array: CUmipmappedArray) -> CUresult {
    code(client::get().and_then(|client| client.arrays.mipmapped(array)).and(Err(CUDA_ERROR_INVALID_VALUE)))
}

pub(crate) unsafe fn cuMipmappedArrayGetMemoryRequirements(
    _requirements: *mut CudaArrayMemoryRequirements,
    array: CUmipmappedArray,
    _device: CUdevice,
) -> CUresult {
    of_another_kind(array)
}

pub(crate) unsafe fn cuMipmappedArrayGetSparseProperties(
    _properties: *mut c_void,
    array: CUmipmappedArray,
) -> CUresult {
    of_another_kind(array)
}

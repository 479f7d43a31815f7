//! Host memory that devices access: page-locked and managed allocations, and registered memory. Devices use the host's addresses.

use rekindle_cuda_abi::types::{
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_OUT_OF_MEMORY,
};

use super::pages;
use super::space::{self, Kind, Region};
use crate::context::Context;
use crate::status::{Result, ensure};

/// Allocates page-locked memory.
pub(crate) fn allocate(context: &Context, len: usize, flags: u32) -> Result<u64> {
    ensure(len > 0 && flags & !0x7 == 0, CUDA_ERROR_INVALID_VALUE)?;
    let base = pages::map(0, paged(len as u64)?).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    insert(context, base, len as u64, Kind::Pinned(flags)).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    Ok(base)
}

/// Frees page-locked memory.
pub(crate) fn free(base: u64) -> Result<()> {
    let region = space::remove(base, |r| matches!(r.kind, Kind::Pinned(_))).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    release(&region);
    Ok(())
}

/// Gives the pages of page-locked or managed memory back, once its region is gone.
pub(crate) fn release(region: &Region) {
    if let (Kind::Pinned(_) | Kind::Managed | Kind::ManagedVariable, Ok(len)) = (region.kind, paged(region.len)) {
        pages::unmap(region.base, len);
    }
}

/// Lets devices access memory of the program's.
pub(crate) fn register(context: &Context, base: u64, len: usize, flags: u32) -> Result<()> {
    ensure(base != 0 && len > 0 && flags & !0xf == 0, CUDA_ERROR_INVALID_VALUE)?;
    ensure(base.checked_add(len as u64).is_some(), CUDA_ERROR_INVALID_VALUE)?;
    ensure(readable(base, len), CUDA_ERROR_INVALID_VALUE)?;
    ensure(space::find(base).is_none_or(|region| !region.kind.is_managed()), CUDA_ERROR_INVALID_VALUE)?;
    insert(context, base, len as u64, Kind::Registered(flags)).map_err(|_| CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
}

/// Ends what [`register`] began.
pub(crate) fn unregister(base: u64) -> Result<()> {
    space::remove(base, |r| matches!(r.kind, Kind::Registered(_)))
        .map(|_| ())
        .ok_or(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
}

pub(super) fn insert(context: &Context, base: u64, len: u64, kind: Kind) -> std::result::Result<(), Region> {
    insert_for((context.device.ordinal, context.handle), base, len, kind)
}

/// As [`insert`], for a context of a device; 0 is none.
pub(super) fn insert_for(
    (device, context): (usize, u64),
    base: u64,
    len: u64,
    kind: Kind,
) -> std::result::Result<(), Region> {
    let all = u64::MAX;
    space::insert(Region { base, len, kind, device, context, readers: all, writers: all, id: space::next_id() })
}

pub(super) fn paged(len: u64) -> Result<u64> {
    len.checked_next_multiple_of(pages::PAGE).ok_or(CUDA_ERROR_OUT_OF_MEMORY)
}

/// Whether every page of a range is mapped: as in the driver, a bad range is refused instead of causing a crash later.
fn readable(base: u64, len: usize) -> bool {
    let first = base & !(pages::PAGE - 1);
    let bytes = (base + len as u64 - first).next_multiple_of(pages::PAGE);
    let mut resident = vec![0_u8; (bytes / pages::PAGE) as usize];
    // SAFETY: asks about pages without touching them; the answer has a byte for each.
    unsafe { libc::mincore(first as *mut _, bytes as usize, resident.as_mut_ptr()) == 0 }
}

//! Managed memory: the host's, which devices access at any time.

use rekindle_cuda_abi::managed::Managed;
use rekindle_cuda_abi::types::CUDA_ERROR_OUT_OF_MEMORY;

use super::pages;
use super::pinned::{self, insert, insert_for, paged};
use super::space::{self, Kind, Region};
use crate::context::Context;
use crate::status::Result;

/// What programs have said of it.
pub(crate) static SAID: Managed = Managed::new();

/// Allocates managed memory.
pub(crate) fn allocate(context: &Context, bytes: usize) -> Result<u64> {
    let base = pages::map(0, paged(bytes as u64)?).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    insert(context, base, bytes as u64, Kind::Managed).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    SAID.add(base..base + bytes as u64);
    Ok(base)
}

/// Allocates managed memory, of zeros, for a variable of code that belongs to a context of a device; 0 is none.
pub(crate) fn allocate_variable(owner: (usize, u64), bytes: u64) -> Result<u64> {
    let base = pages::map(0, paged(bytes)?).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    insert_for(owner, base, bytes, Kind::ManagedVariable).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    SAID.add(base..base + bytes);
    Ok(base)
}

/// Gives back what [`allocate_variable`] has allocated, once nothing uses it.
pub(crate) fn release_variable(base: u64) {
    if let Some(region) = space::remove(base, |r| r.kind == Kind::ManagedVariable) {
        release(&region);
    }
}

/// Gives back the pages of the host's that a region had, once it is gone, and forgets what was said of it.
pub(crate) fn release(region: &Region) {
    if region.kind.is_managed() {
        SAID.remove(region.base);
    }
    pinned::release(region);
}

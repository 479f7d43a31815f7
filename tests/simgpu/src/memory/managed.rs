//! Managed memory: the host's, which devices access at any time.

use rekindle_cuda_abi::managed::Managed;
use rekindle_cuda_abi::types::CUDA_ERROR_OUT_OF_MEMORY;

use super::pages;
use super::pinned::{self, insert, paged};
use super::space::{Kind, Region};
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

/// Gives back the pages of the host's that a region had, once it is gone, and forgets what was said of it.
pub(crate) fn release(region: &Region) {
    if region.kind == Kind::Managed {
        SAID.remove(region.base);
    }
    pinned::release(region);
}

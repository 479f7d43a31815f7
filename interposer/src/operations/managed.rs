//! Allocates and frees managed memory. Large allocations move between the process and the device (`moving.rs`). Small ones are
//! pinned host memory, mapped at one address here and in the worker: the program and the GPU may use it at any time, also together.
//! So is all of it where the kernel or the machine does not let memory move.

use rekindle_cuda_abi::managed::{ATTACH_GLOBAL, ATTACH_HOST};
use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{CONTEXT_SYNC, PINNED_UNMAP, PinnedUnmap, SyncContext};

use super::moving;
use super::pinned::{self, Pages};
use crate::call::perform;
use crate::state::client::Client;
use crate::state::managed::{Freed, ManagedMemory};
use crate::state::memory::Allocation;

/// Allocates managed memory in the current context.
pub(crate) fn allocate(client: &'static Client, bytes: u64, flags: u32) -> Result<u64, CUresult> {
    let (context, device) = client.contexts.current()?;
    if bytes == 0 || !matches!(flags, ATTACH_GLOBAL | ATTACH_HOST) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let base = match client.managed.take(context, bytes) {
        Some(base) => base,
        None => {
            let size = ManagedMemory::area_for(bytes).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
            let (base, size) = match moving::allocate(client, (context, device.device), bytes, flags)? {
                Some(moving) => moving,
                None => {
                    let pages = Pages::allocate(client, size, 0)?;
                    (pages.base, pages.size)
                }
            };
            client.managed.add(context, base, size, bytes);
            base
        }
    };
    client.memory.insert(Allocation::Managed { base, size: bytes, context });
    Ok(base)
}

/// Frees the allocation that begins at `base`, when its context's work is done.
pub(crate) fn free(client: &Client, base: u64) -> Result<(), CUresult> {
    let context = client.managed.context(base).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    perform(CONTEXT_SYNC, &SyncContext { context })?;
    // Forgotten first: another thread may be given the place at once.
    client.memory.remove(base);
    match client.managed.give(base).ok_or(CUDA_ERROR_INVALID_VALUE)? {
        Freed::Kept => Ok(()),
        Freed::Area { base, size } if moving::moves(base) => moving::free(base, size),
        Freed::Area { base, size } => {
            perform(PINNED_UNMAP, &PinnedUnmap { address: base })?;
            pinned::unmap(client, base, size);
            Ok(())
        }
    }
}

/// Unmaps what a context had, which the worker no longer maps.
pub(crate) fn forget_context(client: &Client, context: CUcontext) {
    for (base, size) in client.managed.forget_context(context) {
        if moving::moves(base) { moving::unmap(base, size) } else { pinned::unmap(client, base, size) }
    }
}

//! The checks of a node that the driver makes when the node is created.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::Ordering::Relaxed;

use rekindle_cuda_abi::types::*;
use rekindle_graphs::Kernel;

use crate::operations::function;
use crate::state::client;

/// Checks a launch as the driver does: sizes against the device's limits and the function's own.
pub(super) fn check_kernel(kernel: &Kernel) -> Result<(), CUresult> {
    const MAX_THREADS: u32 = 0;
    const MAX_DYNAMIC_SHARED: u32 = 8;
    // `CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK`, `..._MAX_BLOCK_DIM_X`, `..._MAX_GRID_DIM_X`.
    const BLOCK_THREADS: usize = 1;
    const BLOCK: usize = 2;
    const GRID: usize = 5;
    let client = client::get()?;
    let known = client.functions.get(kernel.function).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    let mut hasher = DefaultHasher::new();
    (kernel.block, kernel.shared_bytes).hash(&mut hasher);
    let digest = hasher.finish() | 1;
    let device = client.contexts.get(kernel.context).ok_or(CUDA_ERROR_INVALID_CONTEXT)?.device;
    let limits = client.devices.get(device).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    let limit = |n: usize| limits.attributes.get(n).map_or(0, |a| a.1 as u32);
    let within = |sizes: [u32; 3], first: usize| (0..3).all(|i| (1..=limit(first + i)).contains(&sizes[i]));
    let threads = kernel.block.iter().map(|n| u64::from(*n)).product::<u64>();
    if !within(kernel.block, BLOCK) || !within(kernel.grid, GRID) || threads > u64::from(limit(BLOCK_THREADS)) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if known.checked.load(Relaxed) == digest {
        return Ok(());
    }
    let attribute = |which| function::attribute(client, kernel.function, device, which).map(|v| v.max(0) as u64);
    if threads > attribute(MAX_THREADS)? || u64::from(kernel.shared_bytes) > attribute(MAX_DYNAMIC_SHARED)? {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    known.checked.store(digest, Relaxed);
    Ok(())
}

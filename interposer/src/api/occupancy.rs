//! Occupancy calls whose parameters need thought: a function of the caller's, and launch configurations.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{OCCUPANCY_BLOCK_SIZE, OCCUPANCY_CLUSTERS, OccupancyBlockSize, OccupancyClusters};

use super::launch::{attribute_bytes, with_attributes};
use super::{check, code, put, put_if};
use crate::call::Call;
use crate::operations::function;
use crate::operations::launch::launchable;
use crate::state::client;

/// The caller's function that returns the shared memory for a block size.
type SharedOfBlock = unsafe extern "C" fn(i32) -> usize;

/// `CU_DEVICE_ATTRIBUTE_*`.
const MULTIPROCESSORS: usize = 16;
const THREADS_OF_MULTIPROCESSOR: usize = 39;
/// `CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK`.
const MAX_THREADS: u32 = 0;
const WARP: i32 = 32;

/// The block size with the most threads on a multiprocessor, and how many such blocks there are on the device. Asks
/// the caller for the shared memory of each block size that is tried, as the driver does: the largest first.
fn potential_block_size(
    function: CUfunction,
    shared: impl Fn(i32) -> usize,
    limit: i32,
    flags: u32,
) -> Result<(i32, i32), CUresult> {
    let client = client::get()?;
    let device = client.contexts.current()?.1.device;
    let known = client.devices.get(device).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    let attribute = |number: usize| known.attributes.get(number).map_or(0, |a| a.1);
    let largest = function::attribute(client, function, device, MAX_THREADS)?;
    let limit = if limit <= 0 { largest } else { limit.min(largest) };
    let full = attribute(THREADS_OF_MULTIPROCESSOR);
    let (mut best, mut most) = ((0, 0), 0);
    for aligned in (1..=(limit + WARP - 1) / WARP).rev().map(|warps| warps * WARP) {
        let size = aligned.min(limit);
        let mut blocks = 0;
        // SAFETY: a local.
        check(unsafe {
            crate::call::remote::cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
                &raw mut blocks,
                function,
                size,
                shared(size),
                flags,
            )
        })?;
        if size * blocks > most {
            most = size * blocks;
            best = (blocks * attribute(MULTIPROCESSORS), size);
        }
        if most >= full {
            break;
        }
    }
    Ok(best)
}

pub(crate) unsafe fn cuOccupancyMaxPotentialBlockSizeWithFlags(
    min_grid: *mut i32,
    block: *mut i32,
    function: CUfunction,
    shared_of_block: *mut c_void,
    shared: usize,
    limit: i32,
    flags: u32,
) -> CUresult {
    let potential = || {
        if min_grid.is_null() || block.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        launchable(function)?;
        if !shared_of_block.is_null() {
            // SAFETY: cuda.h has it be such a function.
            let of_block = unsafe { std::mem::transmute::<*mut c_void, SharedOfBlock>(shared_of_block) };
            // SAFETY: the caller's function, called as cuda.h says.
            return potential_block_size(function, |size| unsafe { of_block(size) }, limit, flags);
        }
        let mut call = Call::in_context(OCCUPANCY_BLOCK_SIZE)?;
        call.put(&OccupancyBlockSize { function, shared_bytes: shared as u64, limit, flags });
        let (result, mut reply) = call.wait();
        check(result)?;
        let mut number = || reply.word().map(|w| w as i32).ok_or(CUDA_ERROR_UNKNOWN);
        Ok((number()?, number()?))
    };
    // SAFETY: not null, so writable by cuda.h's contract.
    code(potential().and_then(|(grid, size)| unsafe { put(min_grid, grid).and(put(block, size)) }))
}

pub(crate) unsafe fn cuOccupancyMaxPotentialBlockSize(
    min_grid: *mut i32,
    block: *mut i32,
    function: CUfunction,
    shared_of_block: *mut c_void,
    shared: usize,
    limit: i32,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuOccupancyMaxPotentialBlockSizeWithFlags(min_grid, block, function, shared_of_block, shared, limit, 0) }
}

/// # Safety
/// As `cuda.h` says for the two functions below.
unsafe fn clusters(out: *mut i32, function: CUfunction, config: *const CUlaunchConfig, sizes: bool) -> CUresult {
    let ask = || {
        if out.is_null() || config.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        launchable(function)?;
        // SAFETY: not null, so a configuration by the caller's promise.
        let config = unsafe { config.read() };
        // SAFETY: as above, with its attributes.
        let attributes = unsafe { attribute_bytes(&config) }?;
        let mut call = Call::in_context(OCCUPANCY_CLUSTERS)?;
        let launch = with_attributes(function, &config, &attributes);
        call.put(&OccupancyClusters { sizes: u64::from(sizes), launch });
        let (result, mut reply) = call.wait();
        check(result)?;
        reply.word().map(|w| w as i32).ok_or(CUDA_ERROR_UNKNOWN)
    };
    // SAFETY: not null, so writable by cuda.h's contract.
    code(ask().map(|number| unsafe { put_if(out, number) }))
}

pub(crate) unsafe fn cuOccupancyMaxActiveClusters(
    number: *mut i32,
    function: CUfunction,
    config: *const CUlaunchConfig,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { clusters(number, function, config, false) }
}

pub(crate) unsafe fn cuOccupancyMaxPotentialClusterSize(
    size: *mut i32,
    function: CUfunction,
    config: *const CUlaunchConfig,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { clusters(size, function, config, true) }
}

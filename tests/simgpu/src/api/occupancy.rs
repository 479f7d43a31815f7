//! How many blocks and clusters of a function fit on a device.

use std::ffi::c_void;

use rekindle_cuda_abi::arguments::{In, Out};
use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUfunction, CUlaunchConfig, CUresult};

use super::launch::shape;
use crate::attributes::{MAX_BLOCK_THREADS, SHARED_OF_MULTIPROCESSOR, SHARED_RESERVED};
use crate::current;
use crate::execution::launch::blocks_of_multiprocessor;
use crate::library::function;
use crate::status::{ensure, status};

/// `CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE`, the only flag.
const DISABLE_CACHING_OVERRIDE: u32 = 1;

pub fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: Out<i32>,
    handle: CUfunction,
    threads: i32,
    shared: usize,
) -> CUresult {
    status(|| {
        current::healthy()?;
        ensure(threads > 0, CUDA_ERROR_INVALID_VALUE)?;
        let fitting = blocks_of_multiprocessor(&*function(handle)?, threads as u32, shared as u64);
        blocks.put(fitting as i32)
    })
}

pub fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    blocks: Out<i32>,
    handle: CUfunction,
    threads: i32,
    shared: usize,
    flags: u32,
) -> CUresult {
    if flags > DISABLE_CACHING_OVERRIDE {
        return CUDA_ERROR_INVALID_VALUE;
    }
    cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, handle, threads, shared)
}

pub fn cuOccupancyAvailableDynamicSMemPerBlock(
    bytes: Out<usize>,
    handle: CUfunction,
    blocks: i32,
    threads: i32,
) -> CUresult {
    status(|| {
        current::healthy()?;
        ensure(blocks > 0 && threads > 0, CUDA_ERROR_INVALID_VALUE)?;
        let function = function(handle)?;
        ensure(blocks_of_multiprocessor(&function, threads as u32, 0) >= blocks as u32, CUDA_ERROR_INVALID_VALUE)?;
        let taken = function.kernel.shared_bytes + SHARED_RESERVED;
        let share = (SHARED_OF_MULTIPROCESSOR / blocks as u32).saturating_sub(taken);
        bytes.put(share.min(function.max_dynamic_shared()) as usize)
    })
}

type SharedOfBlock = unsafe extern "C" fn(i32) -> usize;

/// The smallest block size that fills the device best, and the grid that goes with it.
pub unsafe fn cuOccupancyMaxPotentialBlockSize(
    min_grid: Out<i32>,
    block: Out<i32>,
    handle: CUfunction,
    shared_of_block: *mut c_void,
    shared: usize,
    limit: i32,
) -> CUresult {
    status(|| {
        current::healthy()?;
        let function = function(handle)?;
        let most = if limit > 0 { limit as u32 } else { MAX_BLOCK_THREADS }.min(function.max_threads());
        let shared_of = |threads: u32| match shared_of_block.is_null() {
            true => shared,
            // SAFETY: the caller passes such a function, or null.
            false => unsafe {
                let of_block = std::mem::transmute::<*mut c_void, SharedOfBlock>(shared_of_block);
                of_block(threads as i32)
            },
        };
        let mut best = (0, 0, 0);
        let mut threads = most;
        while threads > 0 {
            let blocks = blocks_of_multiprocessor(&function, threads, shared_of(threads) as u64);
            if blocks * threads > best.0 {
                best = (blocks * threads, threads, blocks);
            }
            threads = (threads - 1) / 32 * 32;
        }
        min_grid.put((best.2 * crate::config::config().multiprocessors) as i32)?;
        block.put(best.1 as i32)
    })
}

pub unsafe fn cuOccupancyMaxPotentialBlockSizeWithFlags(
    min_grid: Out<i32>,
    block: Out<i32>,
    handle: CUfunction,
    shared_of_block: *mut c_void,
    shared: usize,
    limit: i32,
    flags: u32,
) -> CUresult {
    if flags > DISABLE_CACHING_OVERRIDE {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: the arguments of this call.
    unsafe { cuOccupancyMaxPotentialBlockSize(min_grid, block, handle, shared_of_block, shared, limit) }
}

pub fn cuOccupancyMaxActiveClusters(clusters: Out<i32>, handle: CUfunction, config: In<CUlaunchConfig>) -> CUresult {
    status(|| {
        current::healthy()?;
        let config = config.read()?;
        // SAFETY: the caller has just passed it.
        let shape = unsafe { shape(&config) }?;
        let threads = shape.block.iter().product();
        let blocks = blocks_of_multiprocessor(&*function(handle)?, threads, shape.shared.into())
            * crate::config::config().multiprocessors;
        clusters.put((blocks / shape.cluster.iter().product::<u32>().max(1)) as i32)
    })
}

pub fn cuOccupancyMaxPotentialClusterSize(
    size: Out<i32>,
    handle: CUfunction,
    config: *const CUlaunchConfig,
) -> CUresult {
    const PORTABLE: i32 = 8;
    status(|| {
        ensure(!config.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        function(handle)?;
        size.put(PORTABLE)
    })
}

//! Launches.

use std::ffi::c_void;

use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUfunction, CUlaunchConfig, CUresult, CUstream,
};

use crate::execution::launch::{Shape, launch};
use crate::status::{Result, ensure, status};

pub unsafe fn cuLaunchKernel(
    handle: CUfunction,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared: u32,
    stream: CUstream,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    let shape = Shape {
        grid: [grid_x, grid_y, grid_z],
        block: [block_x, block_y, block_z],
        shared,
        cooperative: false,
        cluster: [1; 3],
    };
    status(|| unsafe { launch(handle, shape, stream, params, extra) })
}

pub unsafe fn cuLaunchCooperativeKernel(
    handle: CUfunction,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared: u32,
    stream: CUstream,
    params: *mut *mut c_void,
) -> CUresult {
    let shape = Shape {
        grid: [grid_x, grid_y, grid_z],
        block: [block_x, block_y, block_z],
        shared,
        cooperative: true,
        cluster: [1; 3],
    };
    status(|| unsafe { launch(handle, shape, stream, params, std::ptr::null_mut()) })
}

/// The shape that a configuration with attributes describes.
pub(super) unsafe fn shape(config: &CUlaunchConfig) -> Result<Shape> {
    let mut shape = Shape {
        grid: config.grid,
        block: config.block,
        shared: config.shared_bytes,
        cooperative: false,
        cluster: [1; 3],
    };
    ensure(config.num_attrs == 0 || !config.attrs.is_null(), CUDA_ERROR_INVALID_VALUE)?;
    for i in 0..config.num_attrs as usize {
        let attribute = unsafe { config.attrs.add(i).read_unaligned() };
        let [first, second] = [attribute.value[0], attribute.value[1]];
        match attribute.id {
            // What is cached, how is waited, priorities, memory domains, carveouts: hints.
            0 | 1 | 3 | 5 | 8 | 9 | 10 | 11 | 14 => {}
            2 => shape.cooperative = first as u32 != 0,
            4 => shape.cluster = [first as u32, (first >> 32) as u32, second as u32].map(|n| n.max(1)),
            // A kernel may begin before its predecessor has ended, and need not.
            6 => {}
            _ => return Err(CUDA_ERROR_NOT_SUPPORTED),
        }
    }
    let divides = shape.grid.iter().zip(shape.cluster).all(|(grid, cluster)| grid.is_multiple_of(cluster));
    ensure(divides, CUDA_ERROR_INVALID_VALUE)?;
    Ok(shape)
}

pub unsafe fn cuLaunchKernelEx(
    config: *const CUlaunchConfig,
    handle: CUfunction,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    status(|| {
        ensure(!config.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let config = unsafe { config.read_unaligned() };
        unsafe { launch(handle, shape(&config)?, config.stream, params, extra) }
    })
}

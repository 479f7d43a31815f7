//! Memsets: they travel as the driver table says, once the range is known to be memory.

use rekindle_cuda_abi::types::*;
use rekindle_graphs::hook;

use crate::call::{remote, standing_error};
use crate::state::client;

/// Checks what the driver checks before it enqueues a memset, so that the call need not wait: the range is memory of the
/// driver's, and aligned to the value's size.
fn check_range(address: CUdeviceptr, bytes: u64, element: u64) -> Result<(), CUresult> {
    let client = client::get()?;
    client.contexts.current()?;
    standing_error(client)?;
    if !address.is_multiple_of(element) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if bytes == 0 || client.memory.is_direct(address, bytes) { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

/// Sets `count` elements of `element` bytes, or adds that to the graph that the stream captures.
pub(crate) fn row(
    address: CUdeviceptr,
    value: u32,
    element: u32,
    count: usize,
    stream: CUstream,
) -> Result<(), CUresult> {
    let node = || CudaMemsetNodeParams { dst: address, pitch: 0, value, element, width: count, height: 1 };
    if let Some(answer) = hook::fill(stream, node) {
        return check(answer);
    }
    check_range(address, (count as u64).saturating_mul(element.into()), element.into())?;
    if count == 0 {
        return Ok(());
    }
    // SAFETY: no pointers of the caller's.
    check(unsafe {
        match element {
            1 => remote::cuMemsetD8Async(address, value as u8, count, stream),
            2 => remote::cuMemsetD16Async(address, value as u16, count, stream),
            _ => remote::cuMemsetD32Async(address, value, count, stream),
        }
    })
}

/// Sets `height` rows of `width` elements, `pitch` bytes apart, or adds that to the graph that the stream captures.
pub(crate) fn rows(
    (address, pitch): (CUdeviceptr, usize),
    value: u32,
    element: u32,
    (width, height): (usize, usize),
    stream: CUstream,
) -> Result<(), CUresult> {
    let node = || CudaMemsetNodeParams { dst: address, pitch, value, element, width, height };
    if let Some(answer) = hook::fill(stream, node) {
        return check(answer);
    }
    let last_row = width as u64 * u64::from(element);
    let bytes = (pitch as u64).saturating_mul((height as u64).saturating_sub(1)) + last_row;
    check_range(address, bytes, element.into())?;
    if width == 0 || height == 0 {
        return Ok(());
    }
    // SAFETY: no pointers of the caller's.
    check(unsafe {
        match element {
            1 => remote::cuMemsetD2D8Async(address, pitch, value as u8, width, height, stream),
            2 => remote::cuMemsetD2D16Async(address, pitch, value as u16, width, height, stream),
            _ => remote::cuMemsetD2D32Async(address, pitch, value, width, height, stream),
        }
    })
}

/// The memset of a graph's node.
pub(crate) fn of_node(p: &CudaMemsetNodeParams, stream: CUstream) -> Result<(), CUresult> {
    let CudaMemsetNodeParams { dst, pitch, value, element, width, height } = *p;
    if !matches!(element, 1 | 2 | 4) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let value = if element == 4 { value } else { value & ((1 << (8 * element)) - 1) };
    match height {
        0 | 1 => row(dst, value, element, width, stream),
        _ => rows((dst, pitch), value, element, (width, height), stream),
    }
}

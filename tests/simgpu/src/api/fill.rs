//! Memory set to a value.

use rekindle_cuda_abi::types::{CUdeviceptr, CUresult, CUstream, CudaMemsetNodeParams};
use rekindle_graphs::hook;

use crate::copy::{Side, fill};
use crate::current;
use crate::status::status;

/// A memset that a capture takes.
fn captured(dst: u64, pitch: usize, value: u32, bytes: usize, size: [usize; 2], stream: u64) -> Option<CUresult> {
    let [width, height] = size;
    let element = bytes as u32;
    hook::fill(stream, || CudaMemsetNodeParams { dst, pitch, value, element, width, height })
}

fn row(dst: u64, value: u32, bytes: usize, count: usize, stream: u64, wait: bool) -> CUresult {
    if !wait && let Some(captured) = captured(dst, 0, value, bytes, [count, 1], stream) {
        return captured;
    }
    status(|| fill(&current::stream(stream)?, Side::device(dst), value, bytes, [count, 1], wait))
}

fn rows(dst: u64, pitch: usize, value: u32, bytes: usize, size: [usize; 2], stream: u64, wait: bool) -> CUresult {
    if !wait && let Some(captured) = captured(dst, pitch, value, bytes, size, stream) {
        return captured;
    }
    let side = Side { pitch, ..Side::device(dst) };
    status(|| fill(&current::stream(stream)?, side, value, bytes, size, wait))
}

pub fn cuMemsetD8_v2(dst: CUdeviceptr, value: u8, count: usize) -> CUresult {
    row(dst, value.into(), 1, count, 0, true)
}

pub fn cuMemsetD16_v2(dst: CUdeviceptr, value: u16, count: usize) -> CUresult {
    row(dst, value.into(), 2, count, 0, true)
}

pub fn cuMemsetD32_v2(dst: CUdeviceptr, value: u32, count: usize) -> CUresult {
    row(dst, value, 4, count, 0, true)
}

pub fn cuMemsetD8Async(dst: CUdeviceptr, value: u8, count: usize, stream: CUstream) -> CUresult {
    row(dst, value.into(), 1, count, stream, false)
}

pub fn cuMemsetD16Async(dst: CUdeviceptr, value: u16, count: usize, stream: CUstream) -> CUresult {
    row(dst, value.into(), 2, count, stream, false)
}

pub fn cuMemsetD32Async(dst: CUdeviceptr, value: u32, count: usize, stream: CUstream) -> CUresult {
    row(dst, value, 4, count, stream, false)
}

pub fn cuMemsetD2D8_v2(dst: CUdeviceptr, pitch: usize, value: u8, width: usize, height: usize) -> CUresult {
    rows(dst, pitch, value.into(), 1, [width, height], 0, true)
}

pub fn cuMemsetD2D16_v2(dst: CUdeviceptr, pitch: usize, value: u16, width: usize, height: usize) -> CUresult {
    rows(dst, pitch, value.into(), 2, [width, height], 0, true)
}

pub fn cuMemsetD2D32_v2(dst: CUdeviceptr, pitch: usize, value: u32, width: usize, height: usize) -> CUresult {
    rows(dst, pitch, value, 4, [width, height], 0, true)
}

pub fn cuMemsetD2D8Async(
    dst: CUdeviceptr,
    pitch: usize,
    value: u8,
    width: usize,
    height: usize,
    stream: CUstream,
) -> CUresult {
    rows(dst, pitch, value.into(), 1, [width, height], stream, false)
}

pub fn cuMemsetD2D16Async(
    dst: CUdeviceptr,
    pitch: usize,
    value: u16,
    width: usize,
    height: usize,
    stream: CUstream,
) -> CUresult {
    rows(dst, pitch, value.into(), 2, [width, height], stream, false)
}

pub fn cuMemsetD2D32Async(
    dst: CUdeviceptr,
    pitch: usize,
    value: u32,
    width: usize,
    height: usize,
    stream: CUstream,
) -> CUresult {
    rows(dst, pitch, value, 4, [width, height], stream, false)
}

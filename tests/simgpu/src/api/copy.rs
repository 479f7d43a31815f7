//! Copies of one, two and three dimensions.

use std::ffi::c_void;

use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUcontext, CUdeviceptr, CUresult, CUstream, CudaMemcpy2d,
};

use crate::copy::{Side, copy};
use crate::current;
use crate::status::{Result, ensure, status};

fn linear(dst: Side, src: Side, bytes: usize, stream: u64, wait: bool) -> CUresult {
    status(|| copy(&current::stream(stream)?, dst, src, [bytes, 1, 1], wait))
}

pub unsafe fn cuMemcpy(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) -> CUresult {
    linear(Side::any(dst), Side::any(src), bytes, 0, true)
}

pub unsafe fn cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult {
    linear(Side::any(dst), Side::any(src), bytes, stream, false)
}

pub unsafe fn cuMemcpyHtoD_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize) -> CUresult {
    linear(Side::device(dst), Side::any(src as u64), bytes, 0, true)
}

pub unsafe fn cuMemcpyHtoDAsync_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize, stream: CUstream) -> CUresult {
    linear(Side::device(dst), Side::any(src as u64), bytes, stream, false)
}

pub unsafe fn cuMemcpyDtoH_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize) -> CUresult {
    linear(Side::any(dst as u64), Side::device(src), bytes, 0, true)
}

pub unsafe fn cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult {
    linear(Side::any(dst as u64), Side::device(src), bytes, stream, false)
}

pub unsafe fn cuMemcpyDtoD_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) -> CUresult {
    linear(Side::device(dst), Side::device(src), bytes, 0, true)
}

pub unsafe fn cuMemcpyDtoDAsync_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult {
    linear(Side::device(dst), Side::device(src), bytes, stream, false)
}

pub unsafe fn cuMemcpyPeer(
    dst: CUdeviceptr,
    dst_context: CUcontext,
    src: CUdeviceptr,
    src_context: CUcontext,
    bytes: usize,
) -> CUresult {
    unsafe { cuMemcpyPeerAsync(dst, dst_context, src, src_context, bytes, 0) }
}

pub unsafe fn cuMemcpyPeerAsync(
    dst: CUdeviceptr,
    dst_context: CUcontext,
    src: CUdeviceptr,
    src_context: CUcontext,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    status(|| {
        current::named(dst_context)?;
        current::named(src_context)?;
        copy(&current::stream(stream)?, Side::device(dst), Side::device(src), [bytes, 1, 1], false)
    })
}

/// `CU_MEMORYTYPE_*`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;
const UNIFIED: u32 = 4;

/// One side of a copy of two or three dimensions, as the caller describes it.
struct Described {
    kind: u32,
    host: u64,
    device: u64,
    at: [usize; 3],
    pitch: usize,
    height: usize,
}

impl Described {
    fn side(&self, [width, height, _]: [usize; 3]) -> Result<Side> {
        let base = match self.kind {
            HOST => self.host,
            DEVICE | UNIFIED => self.device,
            // Arrays.
            _ => return Err(CUDA_ERROR_NOT_SUPPORTED),
        };
        let [x, y, z] = self.at;
        let pitch = if self.pitch == 0 { width } else { self.pitch };
        let rows = if self.height == 0 { height } else { self.height };
        ensure(pitch >= width, CUDA_ERROR_INVALID_VALUE)?;
        let slice = pitch.checked_mul(rows).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let offset = z.checked_mul(slice).and_then(|o| o.checked_add(y.checked_mul(pitch)?)?.checked_add(x));
        let address = offset.and_then(|o| base.checked_add(o as u64)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        Ok(Side { address, pitch, slice, device_only: self.kind == DEVICE })
    }
}

unsafe fn plane(described: *const CudaMemcpy2d, stream: u64, wait: bool) -> CUresult {
    status(|| {
        ensure(!described.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let c = unsafe { described.read_unaligned() };
        let size = [c.width, c.height, 1];
        let dst = Described {
            kind: c.dst_type,
            host: c.dst_host as u64,
            device: c.dst_device,
            at: [c.dst_x, c.dst_y, 0],
            pitch: c.dst_pitch,
            height: 0,
        };
        let src = Described {
            kind: c.src_type,
            host: c.src_host as u64,
            device: c.src_device,
            at: [c.src_x, c.src_y, 0],
            pitch: c.src_pitch,
            height: 0,
        };
        copy(&current::stream(stream)?, dst.side(size)?, src.side(size)?, size, wait)
    })
}

pub unsafe fn cuMemcpy2D_v2(described: *const CudaMemcpy2d) -> CUresult {
    unsafe { plane(described, 0, true) }
}

pub unsafe fn cuMemcpy2DUnaligned_v2(described: *const CudaMemcpy2d) -> CUresult {
    unsafe { plane(described, 0, true) }
}

pub unsafe fn cuMemcpy2DAsync_v2(described: *const CudaMemcpy2d, stream: CUstream) -> CUresult {
    unsafe { plane(described, stream, false) }
}

/// One side in `CUDA_MEMCPY3D_v2`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Side3d {
    x: usize,
    y: usize,
    z: usize,
    lod: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    /// Reserved in a plain copy, the context in one between peers.
    reserved: u64,
    pitch: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D_v2`, and `CUDA_MEMCPY3D_PEER`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Memcpy3d {
    src: Side3d,
    dst: Side3d,
    size: [usize; 3],
}

unsafe fn space(described: *const c_void, stream: u64, wait: bool) -> CUresult {
    status(|| {
        ensure(!described.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let c = unsafe { described.cast::<Memcpy3d>().read_unaligned() };
        let describe = |s: &Side3d| Described {
            kind: s.kind,
            host: s.host,
            device: s.device,
            at: [s.x, s.y, s.z],
            pitch: s.pitch,
            height: s.height,
        };
        let (dst, src) = (describe(&c.dst).side(c.size)?, describe(&c.src).side(c.size)?);
        copy(&current::stream(stream)?, dst, src, c.size, wait)
    })
}

pub unsafe fn cuMemcpy3D_v2(described: *const c_void) -> CUresult {
    unsafe { space(described, 0, true) }
}

pub unsafe fn cuMemcpy3DAsync_v2(described: *const c_void, stream: CUstream) -> CUresult {
    unsafe { space(described, stream, false) }
}

pub unsafe fn cuMemcpy3DPeer(described: *const c_void) -> CUresult {
    unsafe { space(described, 0, true) }
}

pub unsafe fn cuMemcpy3DPeerAsync(described: *const c_void, stream: CUstream) -> CUresult {
    unsafe { space(described, stream, false) }
}

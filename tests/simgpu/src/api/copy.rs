//! Copies of bytes in a row.

use std::ffi::c_void;

use rekindle_cuda_abi::types::{
    CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_UNIFIED, CUcontext, CUdeviceptr, CUresult, CUstream,
};

use rekindle_graphs::hook;

use crate::copy::{Side, copy};
use crate::current;
use crate::status::status;

/// One end of a copy: its kind of memory, `CU_MEMORYTYPE_*`, and its address.
type End = (u32, u64);

fn side((kind, address): End) -> Side {
    if kind == CU_MEMORYTYPE_DEVICE { Side::device(address) } else { Side::any(address) }
}

fn linear(dst: End, src: End, bytes: usize, stream: u64, wait: bool) -> CUresult {
    if !wait && let Some(captured) = hook::copy_bytes(stream, dst, src, bytes) {
        return captured;
    }
    let (dst, src) = (side(dst), side(src));
    status(|| copy(&current::stream(stream)?, dst, src, [bytes, 1, 1], wait))
}

pub fn cuMemcpy(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) -> CUresult {
    linear((CU_MEMORYTYPE_UNIFIED, dst), (CU_MEMORYTYPE_UNIFIED, src), bytes, 0, true)
}

pub fn cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult {
    linear((CU_MEMORYTYPE_UNIFIED, dst), (CU_MEMORYTYPE_UNIFIED, src), bytes, stream, false)
}

pub fn cuMemcpyHtoD_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize) -> CUresult {
    linear((CU_MEMORYTYPE_DEVICE, dst), (CU_MEMORYTYPE_HOST, src as u64), bytes, 0, true)
}

pub fn cuMemcpyHtoDAsync_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize, stream: CUstream) -> CUresult {
    linear((CU_MEMORYTYPE_DEVICE, dst), (CU_MEMORYTYPE_HOST, src as u64), bytes, stream, false)
}

pub fn cuMemcpyDtoH_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize) -> CUresult {
    linear((CU_MEMORYTYPE_HOST, dst as u64), (CU_MEMORYTYPE_DEVICE, src), bytes, 0, true)
}

pub fn cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult {
    linear((CU_MEMORYTYPE_HOST, dst as u64), (CU_MEMORYTYPE_DEVICE, src), bytes, stream, false)
}

pub fn cuMemcpyDtoD_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) -> CUresult {
    linear((CU_MEMORYTYPE_DEVICE, dst), (CU_MEMORYTYPE_DEVICE, src), bytes, 0, true)
}

pub fn cuMemcpyDtoDAsync_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult {
    linear((CU_MEMORYTYPE_DEVICE, dst), (CU_MEMORYTYPE_DEVICE, src), bytes, stream, false)
}

pub fn cuMemcpyPeer(
    dst: CUdeviceptr,
    dst_context: CUcontext,
    src: CUdeviceptr,
    src_context: CUcontext,
    bytes: usize,
) -> CUresult {
    status(|| {
        // The copy runs after all earlier commands of both contexts, and before all later ones.
        let [to, from] = [current::or_named(dst_context)?, current::or_named(src_context)?];
        to.synchronize()?;
        from.synchronize()?;
        copy(&current::stream(0)?, Side::device(dst), Side::device(src), [bytes, 1, 1], false)?;
        current::current()?.synchronize()
    })
}

pub fn cuMemcpyPeerAsync(
    dst: CUdeviceptr,
    dst_context: CUcontext,
    src: CUdeviceptr,
    src_context: CUcontext,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    status(|| {
        hook::not_capturable(stream)?;
        current::or_named(dst_context)?;
        current::or_named(src_context)?;
        copy(&current::stream(stream)?, Side::device(dst), Side::device(src), [bytes, 1, 1], false)
    })
}

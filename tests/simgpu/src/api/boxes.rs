//! Copies of two and three dimensions.

use rekindle_cuda_abi::types::{
    CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_UNIFIED, CUDA_ERROR_INVALID_VALUE, CUresult, CUstream, CudaMemcpy2d,
    CudaMemcpy3d, CudaMemcpy3dSide,
};

use rekindle_graphs::hook;

use crate::copy::{Side, copy};
use crate::current;
use crate::status::{ensure, status};

/// Copies a box.
pub(super) fn copy_box(c: &CudaMemcpy3d, stream: CUstream, wait: bool) -> CUresult {
    status(|| {
        let stream = current::stream(stream)?;
        let size = [c.width, c.height, c.depth];
        if size.contains(&0) {
            return Ok(());
        }
        copy(&stream, Side::described(&c.dst, size)?, Side::described(&c.src, size)?, size, wait)
    })
}

unsafe fn described<T: Copy + Into<CudaMemcpy3d>>(described: *const T, stream: CUstream, wait: bool) -> CUresult {
    if described.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let copy = unsafe { described.read_unaligned() }.into();
    if !wait && let Some(captured) = hook::copy(stream, || copy) {
        return captured;
    }
    copy_box(&copy, stream, wait)
}

pub unsafe fn cuMemcpy2D_v2(copy: *const CudaMemcpy2d) -> CUresult {
    unsafe { described(copy, 0, true) }
}

pub unsafe fn cuMemcpy2DUnaligned_v2(copy: *const CudaMemcpy2d) -> CUresult {
    unsafe { described(copy, 0, true) }
}

pub unsafe fn cuMemcpy2DAsync_v2(copy: *const CudaMemcpy2d, stream: CUstream) -> CUresult {
    unsafe { described(copy, stream, false) }
}

pub unsafe fn cuMemcpy3D_v2(copy: *const CudaMemcpy3d) -> CUresult {
    unsafe { described(copy, 0, true) }
}

pub unsafe fn cuMemcpy3DAsync_v2(copy: *const CudaMemcpy3d, stream: CUstream) -> CUresult {
    unsafe { described(copy, stream, false) }
}

/// The contexts of memory must exist; an array's is known.
unsafe fn peer(copy: *const CudaMemcpy3d, stream: CUstream, wait: bool) -> CUresult {
    let known = status(|| {
        if !wait {
            hook::not_capturable(stream)?;
        }
        ensure(!copy.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let c = unsafe { copy.read_unaligned() };
        let device = |s: &CudaMemcpy3dSide| matches!(s.kind, CU_MEMORYTYPE_DEVICE | CU_MEMORYTYPE_UNIFIED);
        [c.dst, c.src].iter().filter(|s| device(s)).try_for_each(|s| current::named(s.context).map(|_| ()))
    });
    if known == 0 { unsafe { described(copy, stream, wait) } } else { known }
}

pub unsafe fn cuMemcpy3DPeer(copy: *const CudaMemcpy3d) -> CUresult {
    unsafe { peer(copy, 0, true) }
}

pub unsafe fn cuMemcpy3DPeerAsync(copy: *const CudaMemcpy3d, stream: CUstream) -> CUresult {
    unsafe { peer(copy, stream, false) }
}

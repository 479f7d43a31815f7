//! Copies of two and three dimensions.

use rekindle_cuda_abi::types::{
    CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_UNIFIED, CUDA_ERROR_INVALID_VALUE, CUresult, CUstream, CopyMemory, CopyPlace,
    CudaMemcpy2d, CudaMemcpy3d, CudaMemcpy3dSide,
};

use rekindle_graphs::hook;

use crate::array::Array;
use crate::copy::{Side, copy};
use crate::status::{Result, ensure, status};
use crate::{current, handles};

/// One side of a copy as the caller describes it.
pub(crate) fn side(s: &CudaMemcpy3dSide, size: [usize; 3]) -> Result<Side> {
    match s.place(size)? {
        CopyPlace::Memory(CopyMemory { address, pitch, rows, .. }) => {
            let slice = pitch.checked_mul(rows).ok_or(CUDA_ERROR_INVALID_VALUE)?;
            Ok(Side { address, pitch, slice, device_only: s.kind == CU_MEMORYTYPE_DEVICE })
        }
        CopyPlace::Array(array, [x, y, z]) => {
            let array = handles::get::<Array>(array)?;
            s.check_in_array(&array.desc, size)?;
            let [pitch, rows, _] = array.extent();
            let slice = pitch * rows;
            let address = array.base + (z * slice + y * pitch + x) as u64;
            Ok(Side { address, pitch, slice, device_only: true })
        }
    }
}

/// Copies a box.
pub(super) fn copy_box(c: &CudaMemcpy3d, stream: CUstream, wait: bool) -> CUresult {
    status(|| {
        let stream = current::stream(stream)?;
        let size = [c.width, c.height, c.depth];
        if size.contains(&0) {
            return Ok(());
        }
        copy(&stream, side(&c.dst, size)?, side(&c.src, size)?, size, wait)
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

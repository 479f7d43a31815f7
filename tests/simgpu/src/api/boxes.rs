//! Copies of two and three dimensions.

use rekindle_cuda_abi::types::{
    CU_MEMORYTYPE_ARRAY, CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_UNIFIED, CUDA_ERROR_INVALID_VALUE,
    CUresult, CUstream, CudaMemcpy2d, CudaMemcpy3d, CudaMemcpy3dSide,
};

use rekindle_graphs::hook;

use crate::copy::{Side, copy};
use crate::status::{Result, ensure, status};
use crate::{current, handles};

/// The most bytes between two rows, `CU_DEVICE_ATTRIBUTE_MAX_PITCH`.
const MAX_PITCH: usize = i32::MAX as usize;

/// One side of a copy as the caller describes it.
pub(crate) fn side(s: &CudaMemcpy3dSide, size: [usize; 3]) -> Result<Side> {
    ensure(s.lod == 0, CUDA_ERROR_INVALID_VALUE)?;
    let base = match s.kind {
        CU_MEMORYTYPE_HOST => s.host,
        CU_MEMORYTYPE_DEVICE | CU_MEMORYTYPE_UNIFIED => s.device,
        CU_MEMORYTYPE_ARRAY => return of_array(s, size),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    let [width, height, depth] = size;
    let pitch = if s.pitch == 0 { width } else { s.pitch };
    let rows = if s.height == 0 { height } else { s.height };
    ensure(pitch >= width && pitch <= MAX_PITCH.max(width), CUDA_ERROR_INVALID_VALUE)?;
    let fits = s.x.checked_add(width).is_some_and(|end| end <= pitch || height <= 1 && depth <= 1);
    let stacked = depth <= 1 || s.y.checked_add(height).is_some_and(|end| end <= rows);
    ensure(fits && stacked, CUDA_ERROR_INVALID_VALUE)?;
    let slice = pitch.checked_mul(rows).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let offset = s.z.checked_mul(slice).and_then(|o| o.checked_add(s.y.checked_mul(pitch)?)?.checked_add(s.x));
    let address = offset.and_then(|o| base.checked_add(o as u64)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    Ok(Side { address, pitch, slice, device_only: s.kind == CU_MEMORYTYPE_DEVICE })
}

fn of_array(s: &CudaMemcpy3dSide, size: [usize; 3]) -> Result<Side> {
    ensure(s.array != 0, CUDA_ERROR_INVALID_VALUE)?;
    let array = handles::array(s.array)?;
    let (extent, element) = (array.extent(), array.desc.element().ok_or(CUDA_ERROR_INVALID_VALUE)?);
    let at = [s.x, s.y, s.z];
    let inside = (0..3).all(|i| at[i].checked_add(size[i]).is_some_and(|end| end <= extent[i]));
    let whole_elements = s.x.is_multiple_of(element) && size[0].is_multiple_of(element);
    ensure(inside && whole_elements, CUDA_ERROR_INVALID_VALUE)?;
    let (pitch, slice) = (extent[0], extent[0] * extent[1]);
    let address = array.base + (s.z * slice + s.y * pitch + s.x) as u64;
    Ok(Side { address, pitch, slice, device_only: true })
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

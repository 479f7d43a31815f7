//! Copies of two and three dimensions.

use rekindle_cuda_abi::arguments::In;
use rekindle_cuda_abi::types::{
    CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_UNIFIED, CUresult, CUstream, CudaMemcpy2d, CudaMemcpy3d, CudaMemcpy3dSide,
};

use rekindle_graphs::hook;

use crate::copy::{Side, copy};
use crate::current;
use crate::status::status;

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

fn described<T: Copy + Into<CudaMemcpy3d>>(described: In<T>, stream: CUstream, wait: bool) -> CUresult {
    let copy = match described.read() {
        Ok(copy) => (*copy).into(),
        Err(code) => return code,
    };
    if !wait && let Some(captured) = hook::copy(stream, || copy) {
        return captured;
    }
    copy_box(&copy, stream, wait)
}

pub fn cuMemcpy2D_v2(copy: In<CudaMemcpy2d>) -> CUresult {
    described(copy, 0, true)
}

pub fn cuMemcpy2DUnaligned_v2(copy: In<CudaMemcpy2d>) -> CUresult {
    described(copy, 0, true)
}

pub fn cuMemcpy2DAsync_v2(copy: In<CudaMemcpy2d>, stream: CUstream) -> CUresult {
    described(copy, stream, false)
}

pub fn cuMemcpy3D_v2(copy: In<CudaMemcpy3d>) -> CUresult {
    described(copy, 0, true)
}

pub fn cuMemcpy3DAsync_v2(copy: In<CudaMemcpy3d>, stream: CUstream) -> CUresult {
    described(copy, stream, false)
}

/// The contexts of memory must exist; the context of an array is known.
fn peer(copy: In<CudaMemcpy3d>, stream: CUstream, wait: bool) -> CUresult {
    let known = status(|| {
        if !wait {
            hook::not_capturable(stream)?;
        }
        let c = copy.read()?;
        let device = |s: &CudaMemcpy3dSide| matches!(s.kind, CU_MEMORYTYPE_DEVICE | CU_MEMORYTYPE_UNIFIED);
        [c.dst, c.src].iter().filter(|s| device(s)).try_for_each(|s| current::named(s.context).map(|_| ()))
    });
    if known == 0 { described(copy, stream, wait) } else { known }
}

pub fn cuMemcpy3DPeer(copy: In<CudaMemcpy3d>) -> CUresult {
    peer(copy, 0, true)
}

pub fn cuMemcpy3DPeerAsync(copy: In<CudaMemcpy3d>, stream: CUstream) -> CUresult {
    peer(copy, stream, false)
}

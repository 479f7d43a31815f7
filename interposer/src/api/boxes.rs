//! The functions that copy boxes of two and three dimensions.

use rekindle_cuda_abi::types::*;
use rekindle_graphs::hook;

use super::code;
use crate::operations::boxes;
use crate::state::client;

/// # Safety
/// `described` is null or a descriptor; host memory that it names is as large as it says.
unsafe fn described<T: Copy + Into<CudaMemcpy3d>>(described: *const T, on: CUstream, wait: bool) -> CUresult {
    if described.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, so a descriptor by the caller's promise.
    let described = unsafe { *described }.into();
    if !wait && let Some(answer) = hook::copy(on, || described) {
        return answer;
    }
    // SAFETY: the caller's promise.
    code(unsafe { boxes::copy(&described, on, wait) })
}

pub(crate) unsafe fn cuMemcpy2D_v2(copy: *const CudaMemcpy2d) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { described(copy, 0, true) }
}

pub(crate) unsafe fn cuMemcpy2DUnaligned_v2(copy: *const CudaMemcpy2d) -> CUresult {
    // SAFETY: as above.
    unsafe { described(copy, 0, true) }
}

pub(crate) unsafe fn cuMemcpy2DAsync_v2(copy: *const CudaMemcpy2d, on: CUstream) -> CUresult {
    // SAFETY: as above.
    unsafe { described(copy, on, false) }
}

pub(crate) unsafe fn cuMemcpy3D_v2(copy: *const CudaMemcpy3d) -> CUresult {
    // SAFETY: as above.
    unsafe { described(copy, 0, true) }
}

pub(crate) unsafe fn cuMemcpy3DAsync_v2(copy: *const CudaMemcpy3d, on: CUstream) -> CUresult {
    // SAFETY: as above.
    unsafe { described(copy, on, false) }
}

/// The contexts of a copy between peers must exist; addresses say by themselves whose they are.
///
/// # Safety
/// As for [`described`].
unsafe fn peer(copy: *const CudaMemcpy3d, on: CUstream, wait: bool) -> CUresult {
    let known = client::get().and_then(|client| {
        if !wait {
            hook::not_capturable(on)?;
        }
        if copy.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, so a descriptor by the caller's promise.
        let c = unsafe { *copy };
        let device = |s: &CudaMemcpy3dSide| matches!(s.kind, CU_MEMORYTYPE_DEVICE | CU_MEMORYTYPE_UNIFIED);
        for side in [&c.dst, &c.src] {
            if device(side) && client.contexts.get(side.context).is_none() {
                return Err(CUDA_ERROR_INVALID_CONTEXT);
            }
        }
        Ok(())
    });
    match known {
        // SAFETY: the caller's promise.
        Ok(()) => unsafe { described(copy, on, wait) },
        Err(error) => error,
    }
}

pub(crate) unsafe fn cuMemcpy3DPeer(copy: *const CudaMemcpy3d) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { peer(copy, 0, true) }
}

pub(crate) unsafe fn cuMemcpy3DPeerAsync(copy: *const CudaMemcpy3d, on: CUstream) -> CUresult {
    // SAFETY: as above.
    unsafe { peer(copy, on, false) }
}

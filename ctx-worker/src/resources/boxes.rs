//! Copies of boxes as the driver takes them.

use rekindle_cuda_abi::types::*;
use rekindle_wire::boxes::Part;

/// The part of a box that lies in host memory, its rows without gaps.
pub(crate) fn packed(host: *mut u8, size: [u64; 3]) -> CudaMemcpy3dSide {
    let [width, height, _] = size.map(|n| n as usize);
    CudaMemcpy3dSide { kind: CU_MEMORYTYPE_HOST, host: host as u64, pitch: width, height, ..Default::default() }
}

/// A part of an array.
pub(crate) fn in_array(array: CUarray, at: [u64; 3]) -> CudaMemcpy3dSide {
    let [x, y, z] = at.map(|n| n as usize);
    CudaMemcpy3dSide { kind: CU_MEMORYTYPE_ARRAY, array, x, y, z, ..Default::default() }
}

/// The copy of a box between two sides.
pub(crate) fn between(dst: CudaMemcpy3dSide, src: CudaMemcpy3dSide, size: [u64; 3]) -> CudaMemcpy3d {
    let [width, height, depth] = size.map(|n| n as usize);
    CudaMemcpy3d { dst, src, width, height, depth }
}

/// A part of an array that is saved or loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArrayPart {
    /// The driver's handle.
    pub(crate) array: CUarray,
    pub(crate) part: Part,
}

impl ArrayPart {
    /// The copy between the array and `host`, in either direction. The part's rows lie in `host` without gaps.
    pub(crate) fn copy(&self, host: *mut u8, to_host: bool) -> CudaMemcpy3d {
        let (array, host) = (in_array(self.array, self.part.at), packed(host, self.part.size));
        let (dst, src) = if to_host { (host, array) } else { (array, host) };
        between(dst, src, self.part.size)
    }
}

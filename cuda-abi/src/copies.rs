//! The meaning of the descriptor of a copy of a box.

use std::ffi::c_void;

use crate::types::*;

/// The most bytes between two rows, `CU_DEVICE_ATTRIBUTE_MAX_PITCH`.
const MAX_PITCH: usize = i32::MAX as usize;

/// Where a side of a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyPlace {
    /// In memory.
    Memory(CopyMemory),
    /// In an array, from these elements' bytes, rows and slices on ([`CudaMemcpy3dSide::check_in_array`]).
    Array(CUarray, [usize; 3]),
}

/// Memory that a copy's side is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyMemory {
    /// The address that the caller named.
    pub base: u64,
    /// Where the box begins.
    pub address: u64,
    /// Bytes from row to row.
    pub pitch: usize,
    /// Rows from slice to slice.
    pub rows: usize,
}

impl CudaMemcpy3dSide {
    /// From some byte of an array on.
    pub fn in_array(array: CUarray, offset: usize) -> Self {
        Self { kind: CU_MEMORYTYPE_ARRAY, array, x: offset, ..Default::default() }
    }

    /// From an address of a device's memory on.
    pub fn on_device(address: CUdeviceptr) -> Self {
        Self { kind: CU_MEMORYTYPE_DEVICE, device: address, ..Default::default() }
    }

    /// From an address of the host's memory on.
    pub fn on_host(address: *const c_void) -> Self {
        Self { kind: CU_MEMORYTYPE_HOST, host: address as u64, ..Default::default() }
    }

    /// Where this side is, in a copy of `size` (bytes of a row, rows, slices; none of them 0), with everything checked
    /// that can be told without knowing what is there.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub fn place(&self, size: [usize; 3]) -> Result<CopyPlace, CUresult> {
        let invalid = CUDA_ERROR_INVALID_VALUE;
        let base = match self.kind {
            _ if self.lod != 0 => return Err(invalid),
            CU_MEMORYTYPE_HOST => self.host,
            CU_MEMORYTYPE_DEVICE | CU_MEMORYTYPE_UNIFIED => self.device,
            CU_MEMORYTYPE_ARRAY if self.array == 0 => return Err(invalid),
            CU_MEMORYTYPE_ARRAY => return Ok(CopyPlace::Array(self.array, [self.x, self.y, self.z])),
            _ => return Err(invalid),
        };
        let [width, height, depth] = size;
        let pitch = if self.pitch == 0 { width } else { self.pitch };
        let rows = if self.height == 0 { height } else { self.height };
        let fits = self.x.checked_add(width).is_some_and(|end| end <= pitch || height <= 1 && depth <= 1);
        // Rows may be fewer than the copy takes only where there is one slice.
        let stacked = depth <= 1 || self.y.checked_add(height).is_some_and(|end| end <= rows);
        if pitch < width || pitch > MAX_PITCH.max(width) || !fits || !stacked {
            return Err(invalid);
        }
        let rows_before = self.z.checked_mul(rows).and_then(|it| it.checked_add(self.y));
        let offset = rows_before.and_then(|it| it.checked_mul(pitch)?.checked_add(self.x)).ok_or(invalid)?;
        let address = base.checked_add(offset as u64).ok_or(invalid)?;
        Ok(CopyPlace::Memory(CopyMemory { base, address, pitch, rows }))
    }

    /// Whether a copy of `size` lies within the array of this side, and begins and ends with an element.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub fn check_in_array(&self, array: &CudaArray3dDescriptor, size: [usize; 3]) -> Result<(), CUresult> {
        let (extent, element) = array.extent().zip(array.element()).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let at = [self.x, self.y, self.z];
        let inside = (0..3).all(|i| at[i].checked_add(size[i]).is_some_and(|end| end <= extent[i]));
        let whole_elements = self.x.is_multiple_of(element) && size[0].is_multiple_of(element);
        if inside && whole_elements { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    }
}

impl CudaMemcpy3d {
    /// A copy of bytes in a row.
    pub fn of_bytes(dst: CudaMemcpy3dSide, src: CudaMemcpy3dSide, bytes: usize) -> Self {
        Self { dst, src, width: bytes, height: 1, depth: 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where device memory from 0x1000 on is in a copy, or `None` for what is not allowed.
    fn memory(at: [usize; 3], pitch: usize, height: usize, size: [usize; 3]) -> Option<(u64, usize, usize)> {
        let [x, y, z] = at;
        let side = CudaMemcpy3dSide { x, y, z, pitch, height, ..CudaMemcpy3dSide::on_device(0x1000) };
        match side.place(size) {
            Ok(CopyPlace::Memory(it)) => Some((it.address, it.pitch, it.rows)),
            Ok(CopyPlace::Array(..)) => panic!("no array"),
            Err(error) => (error != CUDA_ERROR_INVALID_VALUE).then(|| panic!("{error}")),
        }
    }

    #[test]
    fn a_side_without_pitch_and_height_is_as_wide_and_high_as_its_copy() {
        assert_eq!(memory([0; 3], 0, 0, [10, 3, 2]), Some((0x1000, 10, 3)));
        assert_eq!(memory([2, 1, 1], 16, 8, [10, 3, 2]), Some((0x1000 + 2 + 16 + 8 * 16, 16, 8)));
    }

    #[test]
    fn rows_fit_the_pitch_and_slices_the_height_unless_there_is_one_of_them() {
        assert_eq!((memory([7, 0, 0], 16, 8, [10, 2, 1]), memory([7, 0, 0], 16, 8, [10, 1, 2])), (None, None));
        assert_eq!(memory([7, 0, 0], 16, 8, [10, 1, 1]), Some((0x1007, 16, 8)));
        assert_eq!(memory([0, 7, 0], 16, 8, [10, 2, 2]), None);
        assert_eq!(memory([0, 7, 0], 16, 8, [10, 2, 1]), Some((0x1000 + 7 * 16, 16, 8)));
        assert_eq!(memory([0; 3], 9, 0, [10, 1, 1]), None);
        assert_eq!((memory([0; 3], MAX_PITCH + 1, 0, [10, 1, 1]), memory([0; 3], 0, 0, [MAX_PITCH + 1, 1, 1])).0, None);
        assert!(memory([0; 3], 0, 0, [MAX_PITCH + 1, 1, 1]).is_some());
        assert_eq!(memory([0, 0, usize::MAX / 8], 16, 8, [10, 1, 1]), None);
        assert_eq!(memory([usize::MAX, 0, 0], 16, 8, [10, 1, 1]), None);
    }

    #[test]
    fn a_side_is_in_memory_or_in_an_array_at_its_first_level() {
        let size = [8, 2, 1];
        let invalid = Err(CUDA_ERROR_INVALID_VALUE);
        let side = CudaMemcpy3dSide { y: 1, z: 2, ..CudaMemcpy3dSide::in_array(7, 16) };
        assert_eq!(side.place(size), Ok(CopyPlace::Array(7, [16, 1, 2])));
        assert_eq!(CudaMemcpy3dSide { lod: 1, ..side }.place(size), invalid);
        assert_eq!(CudaMemcpy3dSide { array: 0, ..side }.place(size), invalid);
        assert_eq!(CudaMemcpy3dSide { kind: 5, ..side }.place(size), invalid);
        let host = CudaMemcpy3dSide::on_host(std::ptr::without_provenance(0x2000)).place(size);
        assert_eq!(host, Ok(CopyPlace::Memory(CopyMemory { base: 0x2000, address: 0x2000, pitch: 8, rows: 2 })));
        // Elements of 16 bytes, 10 of them in each of 3 rows.
        let array = CudaArray3dDescriptor { width: 10, height: 3, depth: 0, format: 0x20, channels: 4, flags: 0 };
        let outside = Err(CUDA_ERROR_INVALID_VALUE);
        let inside = |x, size| CudaMemcpy3dSide::in_array(7, x).check_in_array(&array, size);
        assert_eq!((inside(0, [160, 3, 1]), inside(32, [16, 1, 1])), (Ok(()), Ok(())));
        assert_eq!(
            (inside(16, [160, 1, 1]), inside(0, [16, 4, 1]), inside(0, [16, 1, 2])),
            (outside, outside, outside)
        );
        assert_eq!(
            (inside(8, [16, 1, 1]), inside(0, [8, 1, 1]), inside(usize::MAX, [16, 1, 1])),
            (outside, outside, outside)
        );
    }
}

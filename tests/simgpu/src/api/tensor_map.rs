//! Tensor maps: checked as `cuda.h` says, and encoded in a form of our own. Kernels that use them are not executed here.

use std::ffi::c_void;

use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUresult};

use crate::config::config;
use crate::current;
use crate::status::{Result, ensure, put, status, values};

/// A `CUtensorMap`: the address first, then the parameters of the encoding.
type Map = [u64; 16];
const ALIGNMENT: usize = 64;
const MAGIC: u64 = 0x7465_6e73_6f72_6d61;
/// The places of words in the map: the mark of a map, and the alignment of its address.
const MAGIC_AT: usize = 1;
const ALIGNED_AT: usize = 2;

/// `CUtensorMapInterleave`.
const INTERLEAVE_32B: u32 = 2;
/// `CUtensorMapSwizzle`.
const SWIZZLE_32B: u32 = 1;

/// Bits of an element of each `CUtensorMapDataType`.
const ELEMENT_BITS: [u64; 16] = [8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6];
/// The packed types, by number: 4 bits aligned to 8 bytes, then those aligned to 16 bytes.
const PACKED_8B: u32 = 13;

/// The part that all encodings share.
struct Tensor {
    data_type: u32,
    interleave: u32,
    swizzle: u32,
    dims: Vec<u64>,
    alignment: u64,
}

fn good(condition: bool) -> Result<()> {
    ensure(condition, CUDA_ERROR_INVALID_VALUE)
}

impl Tensor {
    #[expect(clippy::too_many_arguments, reason = "the calls have them all")]
    /// # Safety
    ///
    /// The arrays must be null or have `rank` elements, and the strides one fewer.
    unsafe fn new(
        map: *mut c_void,
        data_type: u64,
        rank: u32,
        address: *mut c_void,
        dims: *const u64,
        strides: *const u64,
        steps: *const u32,
        [interleave, swizzle, promotion, fill]: [u64; 4],
    ) -> Result<Self> {
        current::healthy()?;
        // Enumerations: the upper halves of their registers mean nothing.
        let (data_type, interleave, swizzle) = (data_type as u32, interleave as u32, swizzle as u32);
        good(!map.is_null() && (map as usize).is_multiple_of(ALIGNMENT))?;
        good(data_type < 16 && interleave <= INTERLEAVE_32B && swizzle <= 6)?;
        good(promotion as u32 <= 3 && fill as u32 <= 1)?;
        good((1..=5).contains(&rank) && (interleave == 0 || rank >= 3))?;
        let packed = data_type > PACKED_8B;
        let alignment = if interleave == INTERLEAVE_32B || packed { 32 } else { 16 };
        good((address as u64).is_multiple_of(alignment))?;
        // SAFETY: the caller's promise.
        let dims = unsafe { values(dims, rank as usize) }?;
        good(dims.iter().all(|dim| (1..=1 << 32).contains(dim)))?;
        good(!packed || dims[0].is_multiple_of(128))?;
        good(data_type != PACKED_8B || dims[0].is_multiple_of(2))?;
        // SAFETY: the caller's promise.
        let strides = unsafe { values(strides, rank as usize - 1) }?;
        good(strides.iter().all(|stride| *stride < 1 << 40 && stride.is_multiple_of(alignment)))?;
        // SAFETY: the caller's promise.
        let steps = unsafe { values(steps, rank as usize) }?;
        let stepped = if interleave == 0 { &steps[1..] } else { &steps[..] };
        good(stepped.iter().all(|step| (1..=8).contains(step)))?;
        good(interleave != INTERLEAVE_32B || swizzle == SWIZZLE_32B)?;
        let floats = [6, 7, 8, 9, 10, 11, 12];
        good(fill as u32 == 0 || floats.contains(&data_type))?;
        Ok(Self { data_type, interleave, swizzle, dims, alignment })
    }

    /// Checks the elements of the innermost dimension that are moved at a time: at most as many bytes as the swizzle spans.
    fn fits(&self, elements: u64) -> Result<()> {
        let bytes = elements * ELEMENT_BITS[self.data_type as usize] / 8;
        let span = match self.swizzle {
            0 => u64::MAX,
            1 => 32,
            2 => 64,
            _ => 128,
        };
        good(self.data_type <= PACKED_8B || elements == 128)?;
        good(self.interleave != 0 || bytes.is_multiple_of(16) && bytes <= span)
    }

    /// # Safety
    ///
    /// `map` must be null or have room for a map.
    unsafe fn write(&self, map: *mut c_void, address: *mut c_void) -> Result<()> {
        let mut encoded: Map = [0; 16];
        (encoded[0], encoded[MAGIC_AT], encoded[ALIGNED_AT]) = (address as u64, MAGIC, self.alignment);
        encoded[3] = u64::from(self.data_type) << 32 | u64::from(self.interleave) << 16 | u64::from(self.swizzle);
        encoded[4..4 + self.dims.len()].copy_from_slice(&self.dims);
        // SAFETY: null or room for a map, by the caller's promise.
        unsafe { put(map.cast(), encoded) }
    }
}

pub unsafe fn cuTensorMapEncodeTiled(
    map: *mut c_void,
    data_type: u64,
    rank: u32,
    address: *mut c_void,
    dims: *const u64,
    strides: *const u64,
    boxes: *const u32,
    steps: *const u32,
    interleave: u64,
    swizzle: u64,
    promotion: u64,
    fill: u64,
) -> CUresult {
    status(|| {
        let modes = [interleave, swizzle, promotion, fill];
        // SAFETY: arrays of a rank's length, by the caller's promise.
        let tensor = unsafe { Tensor::new(map, data_type, rank, address, dims, strides, steps, modes) }?;
        // SAFETY: as above.
        let boxes = unsafe { values(boxes, rank as usize) }?;
        good(boxes.iter().all(|size| (1..=256).contains(size)))?;
        tensor.fits(boxes[0].into())?;
        // SAFETY: room for a map, by the caller's promise.
        unsafe { tensor.write(map, address) }
    })
}

/// The range of a corner's coordinates in a tensor of so many dimensions.
fn corners(rank: u32) -> std::ops::RangeInclusive<i32> {
    match rank {
        3 => -32768..=32767,
        4 => -128..=127,
        _ => -16..=15,
    }
}

pub unsafe fn cuTensorMapEncodeIm2col(
    map: *mut c_void,
    data_type: u64,
    rank: u32,
    address: *mut c_void,
    dims: *const u64,
    strides: *const u64,
    lower: *const i32,
    upper: *const i32,
    channels: u32,
    pixels: u32,
    steps: *const u32,
    interleave: u64,
    swizzle: u64,
    promotion: u64,
    fill: u64,
) -> CUresult {
    status(|| {
        let modes = [interleave, swizzle, promotion, fill];
        // SAFETY: arrays of a rank's length, by the caller's promise.
        let tensor = unsafe { Tensor::new(map, data_type, rank, address, dims, strides, steps, modes) }?;
        good(rank >= 3)?;
        // SAFETY: corners of two coordinates fewer, by the caller's promise.
        let (lower, upper) = unsafe { (values(lower, rank as usize - 2)?, values(upper, rank as usize - 2)?) };
        good(lower.iter().chain(&upper).all(|corner| corners(rank).contains(corner)))?;
        good((1..=256).contains(&channels) && pixels <= 1024)?;
        tensor.fits(channels.into())?;
        // SAFETY: room for a map, by the caller's promise.
        unsafe { tensor.write(map, address) }
    })
}

pub unsafe fn cuTensorMapEncodeIm2colWide(
    map: *mut c_void,
    data_type: u64,
    rank: u32,
    address: *mut c_void,
    dims: *const u64,
    strides: *const u64,
    lower: i32,
    upper: i32,
    channels: u32,
    pixels: u32,
    steps: *const u32,
    interleave: u64,
    mode: u64,
    swizzle: u64,
    promotion: u64,
    fill: u64,
) -> CUresult {
    status(|| {
        let modes = [interleave, swizzle, promotion, fill];
        // SAFETY: arrays of a rank's length, by the caller's promise.
        let tensor = unsafe { Tensor::new(map, data_type, rank, address, dims, strides, steps, modes) }?;
        good(rank >= 3 && mode as u32 <= 1)?;
        // These maps need later devices than the configured ones usually are.
        ensure(config().capability.0 >= 10, CUDA_ERROR_NOT_SUPPORTED)?;
        good([lower, upper].iter().all(|corner| corners(3).contains(corner)))?;
        good((1..=256).contains(&channels) && pixels <= 1024)?;
        tensor.fits(channels.into())?;
        // SAFETY: room for a map, by the caller's promise.
        unsafe { tensor.write(map, address) }
    })
}

pub unsafe fn cuTensorMapReplaceAddress(map: *mut c_void, address: *mut c_void) -> CUresult {
    status(|| {
        current::healthy()?;
        good(!map.is_null() && (map as usize).is_multiple_of(ALIGNMENT))?;
        // SAFETY: not null, so a map by the caller's promise.
        let mut encoded = unsafe { map.cast::<Map>().read_unaligned() };
        good(encoded[MAGIC_AT] == MAGIC && (address as u64).is_multiple_of(encoded[ALIGNED_AT].max(1)))?;
        encoded[0] = address as u64;
        // SAFETY: null or room for a map, by the caller's promise.
        unsafe { put(map.cast(), encoded) }
    })
}

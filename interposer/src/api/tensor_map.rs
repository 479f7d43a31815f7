//! Tensor maps: the worker's driver checks what they say and encodes them.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Writer;
use rekindle_wire::command::{TENSOR_MAP, TensorMap};
use rekindle_wire::tensor_map::{BYTES, Kind};

use super::{check, code};
use crate::call::Call;

/// The alignment of a `CUtensorMap` in `cuda.h`.
const ALIGNMENT: usize = 64;

/// A call, and the parameters that its kind has.
struct Encoding {
    call: Call,
    kind: Kind,
    rest: Writer,
}

impl Encoding {
    fn new(kind: Kind) -> Result<Self, CUresult> {
        Ok(Self { call: Call::new(TENSOR_MAP)?, kind, rest: Writer::new() })
    }
}

/// Begins a call, with what all that encode have first. The rank is one that its kind has.
fn begin(kind: Kind, map: *mut c_void, data_type: u64, rank: u32, address: *mut c_void) -> Result<Encoding, CUresult> {
    // The driver reports a missing context before a wrong parameter.
    let mut encoding = Encoding::new(kind)?;
    if map.is_null() || !(map as usize).is_multiple_of(ALIGNMENT) || !kind.ranks().contains(&(rank as usize)) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // Enumerations: the upper halves of their registers mean nothing.
    for word in [u64::from(data_type as u32), u64::from(rank), address as u64] {
        encoding.rest.word(word);
    }
    Ok(encoding)
}

/// Puts an array.
///
/// # Safety
/// `at` is null or points to `length` elements.
unsafe fn put_array<T: Copy>(
    encoding: &mut Encoding,
    at: *const T,
    length: usize,
    of: impl Fn(T) -> u64,
) -> Result<(), CUresult> {
    if at.is_null() && length > 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    for i in 0..length {
        // SAFETY: not null, so of that length by the caller's promise.
        encoding.rest.word(of(unsafe { at.add(i).read_unaligned() }));
    }
    Ok(())
}

fn put_enums(encoding: &mut Encoding, words: &[u64]) {
    words.iter().for_each(|word| encoding.rest.word(u64::from(*word as u32)));
}

/// Sends, and writes the map that comes back.
///
/// # Safety
/// `map` can be written.
unsafe fn finish(encoding: Encoding, map: *mut c_void) -> Result<(), CUresult> {
    let Encoding { mut call, kind, rest } = encoding;
    call.put(&TensorMap { kind: kind as u64, rest: rest.bytes() });
    let (result, reply) = call.wait();
    check(result)?;
    let mut rest = reply.rest();
    let bytes = rest.blob().ok().filter(|bytes| bytes.len() == BYTES).ok_or(CUDA_ERROR_UNKNOWN)?;
    // SAFETY: room for a tensor map by the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), map.cast(), BYTES) };
    Ok(())
}

fn signed(value: i32) -> u64 {
    u64::from(value as u32)
}

pub(crate) unsafe fn cuTensorMapEncodeTiled(
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
    code(begin(Kind::Tiled, map, data_type, rank, address).and_then(|mut encoding| {
        let n = rank as usize;
        // SAFETY: the caller's promise by cuda.h.
        unsafe {
            put_array(&mut encoding, dims, n, |v| v)?;
            put_array(&mut encoding, strides, n - 1, |v| v)?;
            put_array(&mut encoding, boxes, n, u64::from)?;
            put_array(&mut encoding, steps, n, u64::from)?;
            put_enums(&mut encoding, &[interleave, swizzle, promotion, fill]);
            finish(encoding, map)
        }
    }))
}

pub(crate) unsafe fn cuTensorMapEncodeIm2col(
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
    code(begin(Kind::Im2col, map, data_type, rank, address).and_then(|mut encoding| {
        let n = rank as usize;
        // SAFETY: the caller's promise by cuda.h.
        unsafe {
            put_array(&mut encoding, dims, n, |v| v)?;
            put_array(&mut encoding, strides, n - 1, |v| v)?;
            put_array(&mut encoding, lower, n - 2, signed)?;
            put_array(&mut encoding, upper, n - 2, signed)?;
            put_enums(&mut encoding, &[u64::from(channels), u64::from(pixels)]);
            put_array(&mut encoding, steps, n, u64::from)?;
            put_enums(&mut encoding, &[interleave, swizzle, promotion, fill]);
            finish(encoding, map)
        }
    }))
}

pub(crate) unsafe fn cuTensorMapEncodeIm2colWide(
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
    code(begin(Kind::Im2colWide, map, data_type, rank, address).and_then(|mut encoding| {
        let n = rank as usize;
        // SAFETY: the caller's promise by cuda.h.
        unsafe {
            put_array(&mut encoding, dims, n, |v| v)?;
            put_array(&mut encoding, strides, n - 1, |v| v)?;
            put_enums(&mut encoding, &[signed(lower), signed(upper), u64::from(channels), u64::from(pixels)]);
            put_array(&mut encoding, steps, n, u64::from)?;
            put_enums(&mut encoding, &[interleave, mode, swizzle, promotion, fill]);
            finish(encoding, map)
        }
    }))
}

pub(crate) unsafe fn cuTensorMapReplaceAddress(map: *mut c_void, address: *mut c_void) -> CUresult {
    code(Encoding::new(Kind::Replace).and_then(|mut encoding| {
        if map.is_null() || !(map as usize).is_multiple_of(ALIGNMENT) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        encoding.rest.word(address as u64);
        // SAFETY: not null, so a tensor map by cuda.h's contract.
        encoding.rest.blob(unsafe { std::slice::from_raw_parts(map.cast(), BYTES) });
        // SAFETY: as above.
        unsafe { finish(encoding, map) }
    }))
}

//! Tensor maps: the worker's driver checks what they say and encodes them.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::TENSOR_MAP;
use rekindle_wire::tensor_map::{BYTES, Kind};

use super::{check, code};
use crate::client::Call;

/// cuda.h demands that of a `CUtensorMap`.
const ALIGNMENT: usize = 64;

/// Begins a call, with what all that encode have first. The rank is one that its kind has.
fn begin(kind: Kind, map: *mut c_void, data_type: u64, rank: u32, address: *mut c_void) -> Result<Call, CUresult> {
    // Before anything is known to be wrong with the parameters.
    let mut call = Call::new(TENSOR_MAP)?;
    if map.is_null() || !(map as usize).is_multiple_of(ALIGNMENT) || !kind.ranks().contains(&(rank as usize)) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // Enumerations: the upper halves of their registers mean nothing.
    [kind as u64, u64::from(data_type as u32), u64::from(rank), address as u64].into_iter().for_each(|w| call.word(w));
    Ok(call)
}

/// Puts an array.
///
/// # Safety
/// It is null or has so many elements.
unsafe fn put_array<T: Copy>(
    call: &mut Call,
    at: *const T,
    length: usize,
    of: impl Fn(T) -> u64,
) -> Result<(), CUresult> {
    if at.is_null() && length > 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    for i in 0..length {
        // SAFETY: not null, so of that length by the caller's promise.
        call.word(of(unsafe { at.add(i).read_unaligned() }));
    }
    Ok(())
}

fn put_enums(call: &mut Call, words: &[u64]) {
    words.iter().for_each(|word| call.word(u64::from(*word as u32)));
}

/// Sends, and writes the map that comes back.
///
/// # Safety
/// `map` can be written.
unsafe fn finish(call: Call, map: *mut c_void) -> Result<(), CUresult> {
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
    code(begin(Kind::Tiled, map, data_type, rank, address).and_then(|mut call| {
        let n = rank as usize;
        // SAFETY: the caller's promise by cuda.h.
        unsafe {
            put_array(&mut call, dims, n, |v| v)?;
            put_array(&mut call, strides, n - 1, |v| v)?;
            put_array(&mut call, boxes, n, u64::from)?;
            put_array(&mut call, steps, n, u64::from)?;
            put_enums(&mut call, &[interleave, swizzle, promotion, fill]);
            finish(call, map)
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
    code(begin(Kind::Im2col, map, data_type, rank, address).and_then(|mut call| {
        let n = rank as usize;
        // SAFETY: the caller's promise by cuda.h.
        unsafe {
            put_array(&mut call, dims, n, |v| v)?;
            put_array(&mut call, strides, n - 1, |v| v)?;
            put_array(&mut call, lower, n - 2, signed)?;
            put_array(&mut call, upper, n - 2, signed)?;
            put_enums(&mut call, &[u64::from(channels), u64::from(pixels)]);
            put_array(&mut call, steps, n, u64::from)?;
            put_enums(&mut call, &[interleave, swizzle, promotion, fill]);
            finish(call, map)
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
    code(begin(Kind::Im2colWide, map, data_type, rank, address).and_then(|mut call| {
        let n = rank as usize;
        // SAFETY: the caller's promise by cuda.h.
        unsafe {
            put_array(&mut call, dims, n, |v| v)?;
            put_array(&mut call, strides, n - 1, |v| v)?;
            put_enums(&mut call, &[signed(lower), signed(upper), u64::from(channels), u64::from(pixels)]);
            put_array(&mut call, steps, n, u64::from)?;
            put_enums(&mut call, &[interleave, mode, swizzle, promotion, fill]);
            finish(call, map)
        }
    }))
}

pub(crate) unsafe fn cuTensorMapReplaceAddress(map: *mut c_void, address: *mut c_void) -> CUresult {
    code(Call::new(TENSOR_MAP).and_then(|mut call| {
        if map.is_null() || !(map as usize).is_multiple_of(ALIGNMENT) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        call.word(Kind::Replace as u64);
        call.word(address as u64);
        // SAFETY: not null, so a tensor map by cuda.h's contract.
        call.blob(unsafe { std::slice::from_raw_parts(map.cast(), BYTES) });
        // SAFETY: as above.
        unsafe { finish(call, map) }
    }))
}

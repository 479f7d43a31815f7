//! Tensor maps: the driver checks and encodes them, without looking at the memory that they describe. The application keeps
//! them where it likes, and the addresses in them are the same after a restore.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command;
use rekindle_wire::tensor_map::{BYTES, Kind, MAX_RANK};

use crate::gpu::driver::Driver;
use crate::session::outcome::{Refused, check};

/// A `CUtensorMap`, with the alignment that it must have.
#[repr(C, align(64))]
struct TensorMap([u8; BYTES]);

/// Reads an array of `length` elements; the elements behind them have default values.
fn array<T: Default + Copy>(
    args: &mut Reader<'_>,
    length: usize,
    of: impl Fn(u64) -> T,
) -> Result<[T; MAX_RANK], Malformed> {
    let mut array = [T::default(); MAX_RANK];
    for place in array.iter_mut().take(length) {
        *place = of(args.word()?);
    }
    Ok(array)
}

/// Encodes a tensor map, or changes its address. Returns the map, and the address of its tensor.
pub(crate) fn encode(
    driver: &Driver,
    args: &mut Reader<'_>,
    reply: &mut Writer,
) -> Result<([u8; BYTES], u64), Refused> {
    let mut map = TensorMap([0; BYTES]);
    let at = (&raw mut map).cast();
    let parameters = command::TensorMap::read(args)?;
    let kind = Kind::of(parameters.kind).ok_or(Malformed("a tensor map of no kind"))?;
    let args = &mut Reader::new(parameters.rest);
    if kind == Kind::Replace {
        let address = args.word()?;
        let bytes = args.blob()?;
        map.0 = bytes.try_into().map_err(|_| Malformed("a tensor map of another size"))?;
        args.end()?;
        // SAFETY: the map is a local; the address is a number to the driver.
        check(unsafe { (driver.cuTensorMapReplaceAddress)(at, address as *mut _) })?;
        reply.blob(&map.0);
        return Ok((map.0, address));
    }
    let (data_type, rank, address) = (args.word()?, args.word32()?, args.word()? as *mut _);
    let length = rank as usize;
    if !kind.ranks().contains(&length) {
        return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
    }
    let dims = array(args, length, |word| word)?;
    let strides = array(args, length - 1, |word| word)?;
    let small = |word: u64| word as u32;
    let corner = |word: u64| word as i32;
    let result = match kind {
        Kind::Tiled => {
            let (boxes, steps) = (array(args, length, small)?, array(args, length, small)?);
            let [interleave, swizzle, promotion, fill] = words(args)?;
            args.end()?;
            // SAFETY: the map is a local, arrays are locals of the most elements that the driver reads for any rank,
            // and addresses are numbers to the driver.
            unsafe {
                (driver.cuTensorMapEncodeTiled)(
                    at,
                    data_type,
                    rank,
                    address,
                    dims.as_ptr(),
                    strides.as_ptr(),
                    boxes.as_ptr(),
                    steps.as_ptr(),
                    interleave,
                    swizzle,
                    promotion,
                    fill,
                )
            }
        }
        Kind::Im2col => {
            let (lower, upper) = (array(args, length - 2, corner)?, array(args, length - 2, corner)?);
            let (channels, pixels) = (args.word32()?, args.word32()?);
            let steps = array(args, length, small)?;
            let [interleave, swizzle, promotion, fill] = words(args)?;
            args.end()?;
            // SAFETY: the map is a local, arrays are locals of the most elements that the driver reads for any rank,
            // and addresses are numbers to the driver.
            unsafe {
                (driver.cuTensorMapEncodeIm2col)(
                    at,
                    data_type,
                    rank,
                    address,
                    dims.as_ptr(),
                    strides.as_ptr(),
                    lower.as_ptr(),
                    upper.as_ptr(),
                    channels,
                    pixels,
                    steps.as_ptr(),
                    interleave,
                    swizzle,
                    promotion,
                    fill,
                )
            }
        }
        _ => {
            let (lower, upper) = (corner(args.word()?), corner(args.word()?));
            let (channels, pixels) = (args.word32()?, args.word32()?);
            let steps = array(args, length, small)?;
            let [interleave, mode, swizzle, promotion] = words(args)?;
            let fill = args.word()?;
            args.end()?;
            // SAFETY: the map is a local, arrays are locals of the most elements that the driver reads for any rank,
            // and addresses are numbers to the driver.
            unsafe {
                (driver.cuTensorMapEncodeIm2colWide)(
                    at,
                    data_type,
                    rank,
                    address,
                    dims.as_ptr(),
                    strides.as_ptr(),
                    lower,
                    upper,
                    channels,
                    pixels,
                    steps.as_ptr(),
                    interleave,
                    mode,
                    swizzle,
                    promotion,
                    fill,
                )
            }
        }
    };
    check(result)?;
    reply.blob(&map.0);
    Ok((map.0, address as u64))
}

fn words(args: &mut Reader<'_>) -> Result<[u64; 4], Malformed> {
    Ok([args.word()?, args.word()?, args.word()?, args.word()?])
}

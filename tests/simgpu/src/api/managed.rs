//! Managed memory.

use std::ffi::c_void;

use rekindle_cuda_abi::arguments::{Count, InArray, Out};
use rekindle_cuda_abi::managed::{ATTACH_GLOBAL, ATTACH_HOST, check_attachment, location, passed, places};
use rekindle_cuda_abi::shapes::CUmemLocation;
use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUdevice, CUdeviceptr, CUresult, CUstream};
use rekindle_graphs::hook;

use crate::current;
use crate::device::devices;
use crate::memory::managed::{self, SAID};
use crate::status::{Result, ensure, status};

pub fn cuMemAllocManaged(out: Out<CUdeviceptr>, bytes: usize, flags: u32) -> CUresult {
    status(|| {
        let context = current::healthy()?;
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        out.put(0)?;
        ensure(bytes > 0, CUDA_ERROR_INVALID_VALUE)?;
        ensure(matches!(flags, ATTACH_GLOBAL | ATTACH_HOST), CUDA_ERROR_INVALID_VALUE)?;
        out.put(managed::allocate(&context, bytes)?)
    })
}

fn is_device(ordinal: CUdevice) -> bool {
    usize::try_from(ordinal).is_ok_and(|ordinal| ordinal < devices().len())
}

fn advise(range: (CUdeviceptr, usize), advice: u32, location: CUmemLocation) -> CUresult {
    status(|| SAID.advise(range, advice, location, is_device))
}

pub fn cuMemAdvise(address: CUdeviceptr, count: usize, advice: u32, device: CUdevice) -> CUresult {
    self::advise((address, count), advice, location(device))
}

pub fn cuMemAdvise_v2(address: CUdeviceptr, count: usize, advice: u32, location: u64) -> CUresult {
    self::advise((address, count), advice, passed(location))
}

/// Checks a call that would enqueue something. Its flags must be 0.
fn enqueued(stream: CUstream, flags: u64) -> Result<()> {
    ensure(flags == 0, CUDA_ERROR_INVALID_VALUE)?;
    let context = current::stream(stream)?.context()?;
    hook::not_capturable(stream)?;
    context.check()
}

fn prefetch(range: (CUdeviceptr, usize), location: CUmemLocation, flags: u64, stream: CUstream) -> CUresult {
    status(|| {
        enqueued(stream, flags)?;
        SAID.prefetch(range, location, is_device)
    })
}

pub fn cuMemPrefetchAsync(address: CUdeviceptr, count: usize, device: CUdevice, stream: CUstream) -> CUresult {
    prefetch((address, count), location(device), 0, stream)
}

pub fn cuMemPrefetchAsync_v2(
    address: CUdeviceptr,
    count: usize,
    location: u64,
    flags: u32,
    stream: CUstream,
) -> CUresult {
    prefetch((address, count), passed(location), flags.into(), stream)
}

fn ranges(addresses: InArray<CUdeviceptr>, sizes: InArray<usize>, count: Count) -> Result<Vec<(CUdeviceptr, usize)>> {
    let ranges: Vec<_> = addresses.values(count)?.into_iter().zip(sizes.values(count)?).collect();
    ensure(!ranges.is_empty(), CUDA_ERROR_INVALID_VALUE)?;
    Ok(ranges)
}

pub fn cuMemPrefetchBatchAsync(
    addresses: InArray<CUdeviceptr>,
    sizes: InArray<usize>,
    count: Count,
    locations: InArray<CUmemLocation>,
    starts: InArray<usize>,
    location_count: Count,
    flags: u64,
    stream: CUstream,
) -> CUresult {
    status(|| {
        let ranges = ranges(addresses, sizes, count)?;
        let places = places(ranges.len(), &locations.values(location_count)?, &starts.values(location_count)?)?;
        enqueued(stream, flags)?;
        ranges.into_iter().zip(places).try_for_each(|(range, place)| SAID.prefetch(range, place, is_device))
    })
}

pub fn cuMemDiscardBatchAsync(
    addresses: InArray<CUdeviceptr>,
    sizes: InArray<usize>,
    count: Count,
    flags: u64,
    stream: CUstream,
) -> CUresult {
    status(|| {
        let ranges = ranges(addresses, sizes, count)?;
        enqueued(stream, flags)?;
        ranges.into_iter().try_for_each(|range| SAID.discard(range))
    })
}

pub fn cuMemDiscardAndPrefetchBatchAsync(
    addresses: InArray<CUdeviceptr>,
    sizes: InArray<usize>,
    count: Count,
    locations: InArray<CUmemLocation>,
    starts: InArray<usize>,
    location_count: Count,
    flags: u64,
    stream: CUstream,
) -> CUresult {
    cuMemPrefetchBatchAsync(addresses, sizes, count, locations, starts, location_count, flags, stream)
}

pub unsafe fn cuMemRangeGetAttribute(
    data: *mut c_void,
    size: usize,
    attribute: u32,
    address: CUdeviceptr,
    count: usize,
) -> CUresult {
    // SAFETY: null or room for `size` bytes, by the caller's promise.
    status(|| unsafe { SAID.write((data.cast(), size), attribute, (address, count)) })
}

pub unsafe fn cuMemRangeGetAttributes(
    data: *mut *mut c_void,
    sizes: InArray<usize>,
    attributes: InArray<u32>,
    attribute_count: Count,
    address: CUdeviceptr,
    count: usize,
) -> CUresult {
    status(|| {
        let (sizes, attributes) = (sizes.values(attribute_count)?, attributes.values(attribute_count)?);
        ensure(!attributes.is_empty() && !data.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        sizes.into_iter().zip(attributes).enumerate().try_for_each(|(i, (size, attribute))| {
            // SAFETY: not null, so of that many elements, each with room for its size, by the caller's promise.
            unsafe { SAID.write(((*data.add(i)).cast(), size), attribute, (address, count)) }
        })
    })
}

pub fn cuStreamAttachMemAsync(stream: CUstream, address: CUdeviceptr, length: usize, flags: u32) -> CUresult {
    status(|| {
        enqueued(stream, 0)?;
        let range = SAID.at(address).filter(|range| range.start == address);
        check_attachment(&range.ok_or(CUDA_ERROR_INVALID_VALUE)?, length, flags, stream <= 2)
    })
}

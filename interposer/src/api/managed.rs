//! The functions for managed memory. It lies in host memory that the GPU reaches (`operations/managed.rs`), so moving it and
//! attaching it to streams change nothing but what the program asks about later.

use std::ffi::c_void;

use rekindle_cuda_abi::managed::{check_attachment, location, passed, places};
use rekindle_cuda_abi::raw::values;
use rekindle_cuda_abi::types::*;
use rekindle_graphs::hook;

use super::{code, put};
use crate::call::standing_error;
use crate::operations::{managed, stream};
use crate::process::calling_thread::named_stream;
use crate::state::client::{self, Client};

pub(crate) unsafe fn cuMemAllocManaged(dptr: *mut CUdeviceptr, bytes: usize, flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        if dptr.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let base = managed::allocate(client, bytes as u64, flags);
        // The driver writes a null pointer when it refuses.
        // SAFETY: not null, so writable by cuda.h's contract.
        unsafe { put(dptr, *base.as_ref().unwrap_or(&0)) }?;
        base.map(drop)
    }))
}

/// Whether a program's ordinal names a device.
fn is_device(client: &Client) -> impl Fn(CUdevice) -> bool {
    |ordinal| client.devices.number(ordinal).is_ok()
}

fn advise(range: (CUdeviceptr, usize), advice: u32, location: CUmemLocation) -> CUresult {
    code(client::get().and_then(|client| client.managed.said.advise(range, advice, location, is_device(client))))
}

pub(crate) unsafe fn cuMemAdvise(address: CUdeviceptr, count: usize, advice: u32, device: CUdevice) -> CUresult {
    advise((address, count), advice, location(device))
}

/// `location` is a `CUmemLocation`, passed by value.
pub(crate) unsafe fn cuMemAdvise_v2(address: CUdeviceptr, count: usize, advice: u32, location: u64) -> CUresult {
    advise((address, count), advice, passed(location))
}

/// Checks a call that would enqueue something. Its flags must be 0.
fn enqueued(client: &'static Client, on: CUstream, flags: u64) -> Result<(), CUresult> {
    if flags != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    stream::context_of(on)?;
    hook::not_capturable(on)?;
    standing_error(client)
}

fn prefetch(range: (CUdeviceptr, usize), location: CUmemLocation, flags: u64, on: CUstream) -> CUresult {
    code(client::get().and_then(|client| {
        enqueued(client, on, flags)?;
        client.managed.said.prefetch(range, location, is_device(client))
    }))
}

pub(crate) unsafe fn cuMemPrefetchAsync(
    address: CUdeviceptr,
    count: usize,
    device: CUdevice,
    on: CUstream,
) -> CUresult {
    prefetch((address, count), location(device), 0, on)
}

/// `location` is a `CUmemLocation`, passed by value.
pub(crate) unsafe fn cuMemPrefetchAsync_v2(
    address: CUdeviceptr,
    count: usize,
    location: u64,
    flags: u32,
    on: CUstream,
) -> CUresult {
    prefetch((address, count), passed(location), flags.into(), on)
}

/// Reads the ranges of a batch.
///
/// # Safety
/// The arrays are null or hold `count` elements.
unsafe fn ranges(
    addresses: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
) -> Result<Vec<(CUdeviceptr, usize)>, CUresult> {
    // SAFETY: the caller's promise.
    let (addresses, sizes) = unsafe { (values(addresses, count)?, values(sizes, count)?) };
    if count == 0 { Err(CUDA_ERROR_INVALID_VALUE) } else { Ok(addresses.into_iter().zip(sizes).collect()) }
}

pub(crate) unsafe fn cuMemPrefetchBatchAsync(
    addresses: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    locations: *mut CUmemLocation,
    starts: *mut usize,
    location_count: usize,
    flags: u64,
    on: CUstream,
) -> CUresult {
    code(client::get().and_then(|client| {
        // SAFETY: the caller's promise by cuda.h.
        let (ranges, locations, starts) = unsafe {
            let ranges = ranges(addresses, sizes, count)?;
            (ranges, values(locations, location_count)?, values(starts, location_count)?)
        };
        let places = places(count, &locations, &starts)?;
        enqueued(client, on, flags)?;
        let mut each = ranges.into_iter().zip(places);
        each.try_for_each(|(range, place)| client.managed.said.prefetch(range, place, is_device(client)))
    }))
}

/// The content of what is discarded is undefined. It stays as it is.
pub(crate) unsafe fn cuMemDiscardBatchAsync(
    addresses: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    flags: u64,
    on: CUstream,
) -> CUresult {
    code(client::get().and_then(|client| {
        // SAFETY: the caller's promise by cuda.h.
        let ranges = unsafe { ranges(addresses, sizes, count) }?;
        enqueued(client, on, flags)?;
        ranges.into_iter().try_for_each(|range| client.managed.said.discard(range))
    }))
}

pub(crate) unsafe fn cuMemDiscardAndPrefetchBatchAsync(
    addresses: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    locations: *mut CUmemLocation,
    starts: *mut usize,
    location_count: usize,
    flags: u64,
    on: CUstream,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuMemPrefetchBatchAsync(addresses, sizes, count, locations, starts, location_count, flags, on) }
}

pub(crate) unsafe fn cuMemRangeGetAttribute(
    data: *mut c_void,
    size: usize,
    attribute: u32,
    address: CUdeviceptr,
    count: usize,
) -> CUresult {
    let range = (address, count);
    // SAFETY: the caller's promise by cuda.h.
    code(client::get().and_then(|it| unsafe { it.managed.said.write((data.cast(), size), attribute, range) }))
}

pub(crate) unsafe fn cuMemRangeGetAttributes(
    data: *mut *mut c_void,
    sizes: *mut usize,
    attributes: *mut u32,
    attribute_count: usize,
    address: CUdeviceptr,
    count: usize,
) -> CUresult {
    code(client::get().and_then(|client| {
        // SAFETY: the caller's promise by cuda.h.
        let (data, sizes, attributes) = unsafe {
            (values(data, attribute_count)?, values(sizes, attribute_count)?, values(attributes, attribute_count)?)
        };
        if attribute_count == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        data.into_iter().zip(sizes).zip(attributes).try_for_each(|((data, size), attribute)| {
            // SAFETY: the caller's promise by cuda.h.
            unsafe { client.managed.said.write((data.cast(), size), attribute, (address, count)) }
        })
    }))
}

/// Whatever a stream is attached to, the GPU and the program may both use managed memory at any time.
pub(crate) unsafe fn cuStreamAttachMemAsync(on: CUstream, address: CUdeviceptr, length: usize, flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        enqueued(client, on, 0)?;
        let range = client.managed.said.at(address).filter(|range| range.start == address);
        let is_default = matches!(named_stream(on), CU_STREAM_LEGACY | CU_STREAM_PER_THREAD);
        check_attachment(&range.ok_or(CUDA_ERROR_INVALID_VALUE)?, length, flags, is_default)
    }))
}

//! Memory that other processes have allocated, opened by handles. A handle names the process, and the file behind its device's
//! memory. Opening a handle maps the block's part of that file.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY,
};

use super::pages;
use super::space::{self, Kind, Region};
use super::vmm;
use crate::context::Context;
use crate::device::device;
use crate::status::{Result, ensure};

/// A handle, which applications pass on.
pub(crate) type Handle = [u8; BYTES];

/// Bytes of a handle.
pub(crate) const BYTES: usize = 64;

/// The handle of these words.
pub(crate) fn bytes(words: &[u64]) -> Handle {
    let mut handle = [0; BYTES];
    for (place, word) in handle.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    handle
}

/// The words of a handle.
pub(crate) fn words(handle: &Handle) -> [u64; 8] {
    std::array::from_fn(|at| handle[at * 8..at * 8 + 8].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)))
}

const MAGIC: u64 = u64::from_le_bytes(*b"simgpu m");

/// An open allocation.
struct Open {
    base: u64,
    context: u64,
    reserved: u64,
    len: u64,
    times: u64,
}

fn with_opened<T>(body: impl FnOnce(&mut HashMap<Handle, Open>) -> T) -> T {
    static OPENED: Mutex<Option<HashMap<Handle, Open>>> = Mutex::new(None);
    body(OPENED.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// The handle of the allocation that holds an address.
pub(crate) fn handle(address: u64) -> Result<Handle> {
    let region = space::find(address).filter(|r| r.kind == Kind::Device).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let owner = device(region.device as i32)?;
    ensure(owner.pools.origin(region.base).is_none(), CUDA_ERROR_INVALID_VALUE)?;
    let block = owner.block(region.base).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let words = [
        MAGIC,
        u64::from(std::process::id()),
        block.file as u64,
        region.device as u64,
        block.offset,
        block.len,
        region.base - block.base,
        region.len,
    ];
    Ok(bytes(&words))
}

/// Opens memory of another process in a context; memory that is open already is counted once more.
pub(crate) fn open(context: &Context, handle: &Handle) -> Result<u64> {
    let [magic, pid, file, ordinal, offset, len, inside, size] = words(handle);
    ensure(magic == MAGIC, CUDA_ERROR_INVALID_VALUE)?;
    ensure(pid != u64::from(std::process::id()), CUDA_ERROR_INVALID_CONTEXT)?;
    let owner = device(i32::try_from(ordinal).map_err(|_| CUDA_ERROR_INVALID_VALUE)?)?;
    with_opened(|opened| {
        if let Some(open) = opened.get_mut(handle) {
            ensure(open.context == context.handle, CUDA_ERROR_INVALID_CONTEXT)?;
            open.times += 1;
            return Ok(open.base);
        }
        let path = format!("/proc/{pid}/fd/{file}");
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|_| CUDA_ERROR_INVALID_HANDLE)?;
        let reserved = vmm::reserve(len, 0, 0)?;
        let base = reserved + inside;
        let devices = 1 << owner.ordinal | 1 << context.device.ordinal;
        let region = Region {
            base,
            len: size,
            kind: Kind::Opened,
            device: owner.ordinal,
            context: context.handle,
            readers: devices,
            writers: devices,
            id: space::next_id(),
        };
        if pages::place_part(reserved, len, &OwnedFd::from(file), offset).is_err() || space::insert(region).is_err() {
            vmm::unreserve(reserved, len)?;
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        opened.insert(*handle, Open { base, context: context.handle, reserved, len, times: 1 });
        Ok(base)
    })
}

/// Closes memory when it has been closed as often as it was opened.
pub(crate) fn close(base: u64) -> Result<()> {
    with_opened(|opened| {
        let handle = opened.iter().find(|(_, open)| open.base == base).map(|(handle, _)| *handle);
        let handle = handle.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let Some(open) = opened.get_mut(&handle) else { return Err(CUDA_ERROR_INVALID_VALUE) };
        open.times -= 1;
        if open.times > 0 {
            return Ok(());
        }
        let (reserved, len) = (open.reserved, open.len);
        opened.remove(&handle);
        space::remove(base, |r| r.kind == Kind::Opened);
        vmm::unreserve(reserved, len)
    })
}

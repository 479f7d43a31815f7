//! Pools of other processes. A pool's handle is a file that names the process and the pool. A pointer's names the process, the
//! pool, and the file behind the memory; importing it maps that part of the file.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_UNKNOWN};

use super::ipc::{self, Handle};
use super::pages;
use super::space::{self, Kind, Region};
use super::vmm;
use crate::device::{Device, device};
use crate::pool::{Pool, Source};
use crate::status::{Result, ensure};

const OF_POOL: u64 = u64::from_le_bytes(*b"simgpu o");
const OF_MEMORY: u64 = u64::from_le_bytes(*b"simgpu p");

/// An imported allocation.
struct Open {
    handle: Handle,
    reserved: u64,
    len: u64,
    times: u64,
}

fn with_opened<T>(body: impl FnOnce(&mut HashMap<u64, Open>) -> T) -> T {
    static OPENED: Mutex<Option<HashMap<u64, Open>>> = Mutex::new(None);
    body(OPENED.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// A file that names a pool of a device.
pub(crate) fn export(owner: &Device, pool: &Pool) -> Result<OwnedFd> {
    ensure(pool.handle_types & 1 != 0, CUDA_ERROR_INVALID_VALUE)?;
    let words = [OF_POOL, u64::from(std::process::id()), owner.ordinal as u64, pool.handle];
    let file = pages::memfd(c"simgpu-pool", ipc::BYTES as u64).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    let file = File::from(file);
    file.write_all_at(&ipc::bytes(&words), 0).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    pool.is_exported.store(true, Ordering::SeqCst);
    Ok(file.into())
}

/// The device and the pool that a file names. The file stays the caller's.
pub(crate) fn import(fd: i32) -> Result<(&'static Device, Source)> {
    // SAFETY: makes a new descriptor of one that the caller says is open.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    ensure(copy >= 0, CUDA_ERROR_UNKNOWN)?;
    // SAFETY: the new descriptor is ours alone.
    let file = unsafe { File::from_raw_fd(copy) };
    let mut handle = [0; ipc::BYTES];
    file.read_exact_at(&mut handle, 0).map_err(|_| CUDA_ERROR_UNKNOWN)?;
    let [magic, process, ordinal, pool, ..] = ipc::words(&handle);
    ensure(magic == OF_POOL, CUDA_ERROR_UNKNOWN)?;
    let device = device(i32::try_from(ordinal).map_err(|_| CUDA_ERROR_UNKNOWN)?)?;
    Ok((device, Source { process, pool }))
}

/// What names the allocation at an address for other processes.
pub(crate) fn handle(address: u64) -> Result<Handle> {
    let region = space::find(address).filter(|r| r.base == address && r.kind == Kind::Device);
    let region = region.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let owner = device(region.device as i32)?;
    let pool = owner.pools.pool_of(region.base).filter(|pool| pool.is_exported.load(Ordering::SeqCst));
    let pool = pool.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let block = owner.block(region.base).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let inside = region.base - block.base;
    let process = u64::from(std::process::id());
    Ok(ipc::bytes(&[OF_MEMORY, process, pool.handle, block.file as u64, block.offset, block.len, inside, region.len]))
}

/// Maps an allocation of an imported pool; one that is there already is counted once more.
pub(crate) fn open(owner: &'static Device, pool: std::sync::Arc<Pool>, handle: &Handle) -> Result<u64> {
    let [magic, process, of, file, offset, len, inside, size] = ipc::words(handle);
    let right = magic == OF_MEMORY && pool.source == Some(Source { process, pool: of });
    ensure(right, CUDA_ERROR_INVALID_VALUE)?;
    with_opened(|opened| {
        if let Some((base, open)) = opened.iter_mut().find(|(_, open)| open.handle == *handle) {
            open.times += 1;
            return Ok(*base);
        }
        let path = format!("/proc/{process}/fd/{file}");
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        let reserved = vmm::reserve(len, 0, 0)?;
        let base = reserved + inside;
        let devices = 1 << owner.ordinal | pool.access.load(Ordering::SeqCst);
        let region = Region {
            base,
            len: size,
            kind: Kind::Opened,
            device: owner.ordinal,
            context: 0,
            readers: devices,
            writers: devices,
            id: space::next_id(),
        };
        if pages::place_part(reserved, len, &OwnedFd::from(file), offset).is_err() || space::insert(region).is_err() {
            vmm::unreserve(reserved, len)?;
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        owner.pools.note(base, pool, size);
        opened.insert(base, Open { handle: *handle, reserved, len, times: 1 });
        Ok(base)
    })
}

/// Whether the allocation at an address came from another process.
pub(crate) fn is_open(base: u64) -> bool {
    with_opened(|opened| opened.contains_key(&base))
}

/// Frees an imported allocation, which nothing uses any more, when it has been freed as often as it was imported.
pub(crate) fn close(owner: &Device, base: u64) -> Result<()> {
    with_opened(|opened| {
        let open = opened.get_mut(&base).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        open.times -= 1;
        if open.times > 0 {
            return Ok(());
        }
        let (reserved, len) = (open.reserved, open.len);
        opened.remove(&base);
        if let Some(region) = space::remove(base, |r| r.kind == Kind::Opened) {
            owner.pools.forget(base, region.len);
        }
        vmm::unreserve(reserved, len)
    })
}

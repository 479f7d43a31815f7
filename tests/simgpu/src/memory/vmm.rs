//! Virtual memory management: reserved addresses, physical pieces of memory, and mappings of pieces at addresses.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY, CUmemAllocationProp,
    MEMORY_GRANULARITY,
};

use super::pages;
use super::space::{self, Kind, Region};
use crate::device::Device;
use crate::fault;
use crate::handles;
use crate::status::{Result, ensure};

/// A piece of a device's memory, mapped any number of times. It ends with its last handle and mapping.
#[derive(Debug)]
pub(crate) struct Piece {
    /// The number that names it in calls.
    pub(crate) handle: u64,
    /// Its length in bytes.
    pub(crate) len: u64,
    /// The properties that it was created with.
    pub(crate) properties: CUmemAllocationProp,
    device: &'static Device,
    file: OwnedFd,
    /// Whether this process's device counts its memory; for an imported piece, the exporting process counts it.
    charged: bool,
}

impl Drop for Piece {
    fn drop(&mut self) {
        if self.charged {
            self.device.memory.release(self.len);
        }
    }
}

#[derive(Default)]
struct Vmm {
    reservations: BTreeMap<u64, u64>,
    /// The mappings: base to length and piece.
    mappings: BTreeMap<u64, (u64, Arc<Piece>)>,
    /// Pieces that the program holds, with the number of holds.
    held: HashMap<u64, (Arc<Piece>, usize)>,
}

static VMM: Mutex<Option<Vmm>> = Mutex::new(None);

fn with<T>(body: impl FnOnce(&mut Vmm) -> T) -> T {
    let mut guard: MutexGuard<'_, Option<Vmm>> = VMM.lock().unwrap_or_else(PoisonError::into_inner);
    body(guard.get_or_insert_default())
}

/// Where reservations without a hint begin.
const WINDOW: u64 = 0x1800_0000_0000;
const WINDOW_END: u64 = 0x1f00_0000_0000;

fn is_blocks(value: u64) -> bool {
    value != 0 && value.is_multiple_of(MEMORY_GRANULARITY)
}

/// The least reservation that is placed at its hint (driver 580: between 8 and 64 MiB).
const LEAST_PLACED: u64 = 32 << 20;

/// Reserves addresses: the hinted ones if they are free, otherwise others.
pub(crate) fn reserve(len: u64, align: u64, hint: u64) -> Result<u64> {
    ensure(is_blocks(len) && (align == 0 || align.is_power_of_two()), CUDA_ERROR_INVALID_VALUE)?;
    let align = align.max(MEMORY_GRANULARITY);
    with(|vmm| {
        let mut next = WINDOW;
        let hinted = hint != 0 && hint.is_multiple_of(align) && len >= LEAST_PLACED;
        let mut candidate = if hinted { hint } else { 0 };
        loop {
            if candidate == 0 {
                candidate = vmm.gap(next, len, align).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
                next = candidate + align;
            }
            match pages::reserve(candidate, len) {
                Ok(_) => {
                    vmm.reservations.insert(candidate, len);
                    return Ok(candidate);
                }
                Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => {
                    return Err(CUDA_ERROR_OUT_OF_MEMORY);
                }
                Err(_) => candidate = 0,
            }
        }
    })
}

/// Gives reserved addresses back, which nothing may be mapped at.
pub(crate) fn unreserve(base: u64, len: u64) -> Result<()> {
    with(|vmm| {
        ensure(vmm.reservations.get(&base) == Some(&len), CUDA_ERROR_INVALID_VALUE)?;
        ensure(vmm.mappings.range(base..base + len).next().is_none(), CUDA_ERROR_INVALID_VALUE)?;
        vmm.reservations.remove(&base);
        pages::unmap(base, len);
        Ok(())
    })
}

/// Creates a piece of memory on a device, held once.
pub(crate) fn create(device: &'static Device, len: u64, properties: CUmemAllocationProp) -> Result<u64> {
    ensure(is_blocks(len), CUDA_ERROR_INVALID_VALUE)?;
    fault::point("alloc")?;
    device.memory.charge(len)?;
    let name = std::ffi::CString::new(format!("{FILE_NAME}{}", device.ordinal)).unwrap_or_default();
    let Ok(file) = pages::memfd(&name, len) else {
        device.memory.release(len);
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    };
    Ok(hold_new(Piece { handle: handles::next(), len, properties, device, file, charged: true }))
}

fn hold_new(piece: Piece) -> u64 {
    let handle = piece.handle;
    with(|vmm| vmm.held.insert(handle, (Arc::new(piece), 1)));
    handle
}

/// Releases one hold of a piece.
pub(crate) fn release(handle: u64) -> Result<()> {
    with(|vmm| {
        let (_, times) = vmm.held.get_mut(&handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        *times -= 1;
        if *times == 0 {
            vmm.held.remove(&handle);
        }
        Ok(())
    })
}

/// Adds a hold of the piece that is mapped at an address.
pub(crate) fn retain_at(address: u64) -> Result<u64> {
    with(|vmm| {
        let piece = vmm.piece_at(address).ok_or(CUDA_ERROR_INVALID_VALUE)?.clone();
        let handle = piece.handle;
        vmm.held.entry(handle).or_insert((piece, 0)).1 += 1;
        Ok(handle)
    })
}

/// The piece that a handle names.
pub(crate) fn piece(handle: u64) -> Result<Arc<Piece>> {
    with(|vmm| vmm.held.get(&handle).map(|held| held.0.clone()).ok_or(CUDA_ERROR_INVALID_VALUE))
}

/// Maps a whole piece into reserved addresses. No device has access yet.
pub(crate) fn map(base: u64, len: u64, offset: u64, handle: u64) -> Result<()> {
    ensure(offset == 0, CUDA_ERROR_NOT_SUPPORTED)?;
    ensure(len > 0 && base.is_multiple_of(MEMORY_GRANULARITY), CUDA_ERROR_INVALID_VALUE)?;
    let piece = piece(handle)?;
    ensure(is_blocks(len) && len <= piece.len, CUDA_ERROR_NOT_SUPPORTED)?;
    with(|vmm| {
        let end = base.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let reserved = vmm.reservations.range(..=base).next_back();
        ensure(reserved.is_some_and(|(&start, &size)| end <= start + size), CUDA_ERROR_INVALID_VALUE)?;
        // A mapping that is being removed has no region any more, but still has its pages, which would be taken from the new
        // mapping.
        let before = vmm.mappings.range(..end).next_back();
        ensure(before.is_none_or(|(&start, (size, _))| start + size <= base), CUDA_ERROR_INVALID_VALUE)?;
        let region = Region {
            base,
            len,
            kind: Kind::Mapped,
            device: piece.device.ordinal,
            context: 0,
            readers: 0,
            writers: 0,
            id: space::next_id(),
        };
        space::insert(region).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        if pages::place_file(base, len, &piece.file).is_err() {
            space::remove(base, |_| true);
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        vmm.mappings.insert(base, (len, piece));
        Ok(())
    })
}

/// Ends the mappings from `base` to `base + len`, which must be whole; there may be gaps.
pub(crate) fn unmap(base: u64, len: u64) -> Result<()> {
    ensure(is_blocks(len), CUDA_ERROR_INVALID_VALUE)?;
    let end = base.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    ensure(space::find(base).is_none_or(|r| r.base == base), CUDA_ERROR_INVALID_VALUE)?;
    ensure(space::find(end - 1).is_none_or(|r| r.end() == end), CUDA_ERROR_INVALID_VALUE)?;
    let gone = space::remove_all(|r| r.kind == Kind::Mapped && r.base >= base && r.end() <= end);
    with(|vmm| {
        for region in gone {
            pages::clear(region.base, region.len);
            vmm.mappings.remove(&region.base);
        }
    });
    Ok(())
}

/// Sets a device's rights in mapped addresses.
pub(crate) fn set_access(base: u64, len: u64, device: &Device, read: bool, write: bool) -> Result<()> {
    let bit = 1 << device.ordinal;
    let set = |mask: &mut u64, on: bool| *mask = if on { *mask | bit } else { *mask & !bit };
    let changed = space::change(base, len, Kind::Mapped, |region| {
        set(&mut region.readers, read);
        set(&mut region.writers, write);
    });
    ensure(len > 0 && changed, CUDA_ERROR_INVALID_VALUE)
}

/// The name of a piece's descriptor; the ordinal of its device follows.
const FILE_NAME: &str = "simgpu-device-";

/// A descriptor by which another process can map the piece.
pub(crate) fn export(handle: u64) -> Result<OwnedFd> {
    let piece = piece(handle)?;
    ensure(piece.charged && piece.properties.handle_types & 1 != 0, CUDA_ERROR_INVALID_VALUE)?;
    piece.file.try_clone().map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
}

/// A piece from its descriptor, which stays the caller's.
pub(crate) fn import(fd: i32) -> Result<u64> {
    let name = std::fs::read_link(format!("/proc/self/fd/{fd}")).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    let name = name.to_string_lossy();
    let ordinal = name
        .strip_prefix("/memfd:")
        .and_then(|n| n.strip_prefix(FILE_NAME))
        .and_then(|n| n.split_whitespace().next()?.parse().ok())
        .ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let device = crate::device::device(ordinal)?;
    // SAFETY: makes a new descriptor of one that the caller says is open.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    ensure(copy >= 0, CUDA_ERROR_OUT_OF_MEMORY)?;
    // SAFETY: the new descriptor is ours alone.
    let file = unsafe { OwnedFd::from_raw_fd(copy) };
    // SAFETY: all zero is a valid value of this structure.
    let mut about: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: writes the structure.
    ensure(unsafe { libc::fstat(file.as_raw_fd(), &mut about) } == 0, CUDA_ERROR_INVALID_VALUE)?;
    let len = about.st_size.cast_unsigned();
    ensure(is_blocks(len), CUDA_ERROR_INVALID_VALUE)?;
    let properties =
        CUmemAllocationProp { kind: 1, handle_types: 1, location_type: 1, location_id: ordinal, ..Default::default() };
    Ok(hold_new(Piece { handle: handles::next(), len, properties, device, file, charged: false }))
}

/// The reservation that holds an address: its base and its length.
pub(crate) fn reservation_at(address: u64) -> Option<(u64, u64)> {
    with(|vmm| {
        let (&base, &len) = vmm.reservations.range(..=address).next_back()?;
        (address < base + len).then_some((base, len))
    })
}

impl Vmm {
    fn piece_at(&self, address: u64) -> Option<&Arc<Piece>> {
        let (&base, (len, piece)) = self.mappings.range(..=address).next_back()?;
        (address < base + len).then_some(piece)
    }

    /// The lowest aligned address from `from` on that no reservation covers.
    fn gap(&self, from: u64, len: u64, align: u64) -> Option<u64> {
        let mut at = from.next_multiple_of(align);
        for (&start, &size) in &self.reservations {
            if start >= at.checked_add(len)? {
                break;
            }
            if start + size > at {
                at = (start + size).next_multiple_of(align);
            }
        }
        (at.checked_add(len)? <= WINDOW_END).then_some(at)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::time::{Duration, Instant};

    use super::space::View;
    use super::*;

    /// Addresses that nothing else in this process uses.
    const AT: u64 = 0x0900_0000_0000;

    #[test]
    fn addresses_are_free_again_when_the_mapping_is_gone_and_not_before() {
        let device = &crate::device::create()[0];
        reserve(LEAST_PLACED, 0, AT).unwrap();
        let [old, new] = [(); 2].map(|()| create(device, MEMORY_GRANULARITY, CUmemAllocationProp::default()).unwrap());
        map(AT, MEMORY_GRANULARITY, 0, old).unwrap();
        // A kernel that goes on: nothing is unmapped until it looks again.
        let kernel = View::open(0);
        let unmapping = std::thread::spawn(|| unmap(AT, MEMORY_GRANULARITY));
        let began = Instant::now();
        while space::find(AT).is_some() {
            assert!(began.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
        assert_eq!(map(AT, MEMORY_GRANULARITY, 0, new), Err(CUDA_ERROR_INVALID_VALUE));
        assert!(!unmapping.is_finished());
        drop(kernel);
        unmapping.join().unwrap().unwrap();
        map(AT, MEMORY_GRANULARITY, 0, new).unwrap();
        // SAFETY: mapped just now, and used by nobody else.
        unsafe { (AT as *mut u64).write_volatile(1) };
        unmap(AT, MEMORY_GRANULARITY).unwrap();
    }
}

//! Pinned host memory on the worker's side: memfds that came over the connection, and files that the client has mapped and the
//! daemon has brought, mapped at the client's addresses and registered with the driver.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use rekindle_cuda_abi::types::*;
use rekindle_images as images;
use rekindle_wire::attach::Pinned;
use rekindle_wire::userfault::{self, Userfault};
use rekindle_wire::{layout, window};
use tracing::warn;

use crate::gpu::driver::{CallFailed, Driver, checked};
use crate::resources::not_loaded::NotLoaded;
use crate::session::share::{Share, What, Withdrawn};
use crate::session::state::{self, State};

/// Memfds that have arrived but are not mapped yet. The thread that reads the connection adds them.
#[derive(Default)]
pub(crate) struct Arrived {
    files: Mutex<Vec<(Pinned, OwnedFd)>>,
    more: Condvar,
    /// The client's userfaultfd, which comes with the first memfd of managed memory.
    userfault: OnceLock<Arc<Userfault>>,
}

/// The most memfds that may wait to be mapped.
const MAX_ARRIVED: usize = 1024;

impl Arrived {
    /// Keeps the client's userfaultfd. Returns it if it is the first that has come: a client has one.
    pub(crate) fn put_userfault(&self, fd: OwnedFd) -> Option<Arc<Userfault>> {
        // A client may send anything.
        if !userfault::is_one(fd.as_raw_fd()) {
            return None;
        }
        let userfault = Arc::new(Userfault::from(fd));
        self.userfault.set(Arc::clone(&userfault)).is_ok().then_some(userfault)
    }

    pub(crate) fn userfault(&self) -> Option<Arc<Userfault>> {
        self.userfault.get().cloned()
    }

    /// Adds a memfd that has come. `false` where a client sends more memfds than it maps.
    pub(crate) fn put(&self, pinned: Pinned, file: OwnedFd) -> bool {
        let Ok(mut files) = self.files.lock() else { return false };
        if pinned.file_offset.is_some() {
            // An earlier one was never mapped.
            files.retain(|(p, _)| p.address != pinned.address || p.file_offset.is_none());
        }
        files.push((pinned, file));
        self.more.notify_all();
        files.len() <= MAX_ARRIVED
    }

    /// Takes the memfd for an address (and serial number, if one is given), and waits a moment for it: the memfd was sent
    /// before the command, but over another channel. Other memfds for the same address belong to earlier allocations, and
    /// are dropped.
    pub(crate) fn take(&self, address: u64, serial: Option<u64>) -> Option<(Pinned, OwnedFd)> {
        let mut files = self.files.lock().ok()?;
        for _ in 0..50 {
            let wanted = |p: &Pinned| p.address == address && serial.is_none_or(|s| s == p.serial);
            if let Some(i) = files.iter().position(|(p, _)| wanted(p)) {
                let (pinned, file) = files.remove(i);
                files.retain(|(p, _)| p.address != address || p.serial > pinned.serial);
                return Some((pinned, file));
            }
            files = self.more.wait_timeout(files, Duration::from_millis(100)).ok()?.0;
        }
        None
    }
}

/// A pinned allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub(crate) size: u64,
    pub(crate) flags: u32,
    pub(crate) context: u64,
}

/// All pinned allocations of the client.
#[derive(Default)]
pub(crate) struct PinnedMemory {
    pub(crate) arrived: Arc<Arrived>,
    allocations: BTreeMap<u64, Allocation>,
    /// The container's share, if pinned memory counts with that of other workers.
    share: Option<Arc<Share>>,
}

/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`: every context and device may use it.
const REGISTER: u32 = 3;

impl PinnedMemory {
    pub(crate) fn allocations(&self) -> &BTreeMap<u64, Allocation> {
        &self.allocations
    }

    /// The number of bytes of all allocations.
    pub(crate) fn bytes(&self) -> u64 {
        self.allocations.values().map(|it| it.size).sum()
    }

    /// Writes for the image what its list of pinned memory has no place for.
    pub(crate) fn write(&self, state: &mut State) {
        let saved = |(&address, it): (&u64, &Allocation)| state::PinnedMemory {
            address,
            context: it.context,
            ..state::PinnedMemory::default()
        };
        state.pinned = self.allocations.iter().map(saved).collect();
    }

    /// Reads what [`PinnedMemory::write`] wrote, with that list. Returns the allocations to map once their memfds have
    /// come.
    pub(crate) fn read(state: &State, listed: &[images::Pinned]) -> Result<Vec<(u64, Allocation)>, NotLoaded> {
        let contexts: HashMap<u64, u64> = state.pinned.iter().map(|it| (it.address, it.context)).collect();
        let expected = listed.iter().map(|it| {
            let context = contexts.get(&it.address).copied();
            let context = context.ok_or(NotLoaded::Image("pinned memory without a context"))?;
            Ok((it.address, Allocation { size: it.size, flags: it.flags as u32, context }))
        });
        expected.collect()
    }

    /// Counts the memory pinned here together with that of other workers of the container.
    pub(crate) fn belong(&mut self, share: Arc<Share>) {
        self.share = Some(share);
        self.publish();
    }

    /// Whether so many more bytes may be pinned; if so, they count, until the mapping succeeds or fails.
    pub(crate) fn take(&self, bytes: u64) -> bool {
        let own = self.bytes();
        self.share.as_ref().is_none_or(|share| share.take(What::Pinned, own, own.saturating_add(bytes)))
    }

    fn publish(&self) {
        if let Some(share) = &self.share {
            share.set(What::Pinned, self.bytes());
        }
    }

    /// Maps and registers the memfd that came for this address.
    pub(crate) fn map(
        &mut self,
        driver: &Driver,
        address: u64,
        serial: Option<u64>,
        allocation: Allocation,
    ) -> CUresult {
        let result = self.try_map(driver, address, serial, allocation);
        self.publish();
        result
    }

    fn try_map(&mut self, driver: &Driver, address: u64, serial: Option<u64>, allocation: Allocation) -> CUresult {
        let Some((pinned, file)) = self.arrived.take(address, serial) else { return CUDA_ERROR_INVALID_VALUE };
        let Pinned { size, file_offset, .. } = pinned;
        let end = address.checked_add(allocation.size);
        let inside = end.is_some_and(|end| address >= window::PINNED_BASE && end <= window::pinned().end);
        let aligned = address.is_multiple_of(4096) && allocation.size.is_multiple_of(4096);
        // A file that the client truncates has its pages until it is unregistered. This process does not touch them.
        if size != allocation.size || !inside || !aligned || !(file_offset.is_some() || is_sealed(&file, size)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        if !map_fixed(&file, address, size, file_offset.unwrap_or(0), libc::MAP_POPULATE) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        // SAFETY: the range was mapped just now and stays until `unmap`.
        let result = unsafe { (driver.cuMemHostRegister_v2)(address as *mut _, size as usize, REGISTER) };
        if result != CUDA_SUCCESS {
            // SAFETY: mapped above, and the driver does not use it.
            unsafe { libc::munmap(address as *mut _, size as usize) };
            return result;
        }
        self.allocations.insert(address, allocation);
        CUDA_SUCCESS
    }

    /// Unregisters all allocations, which stay mapped. No device uses them again. Returns the first error.
    pub(crate) fn unregister_all(&self, driver: &Driver) -> Result<(), CallFailed> {
        let unregister = |address: &u64| {
            // SAFETY: registered by `map`, once.
            checked("cuMemHostUnregister", unsafe { (driver.cuMemHostUnregister)(*address as *mut _) })
        };
        self.allocations.keys().map(unregister).fold(Ok(()), Result::and)
    }

    /// Counts no memory of this worker's any more together with that of others: another worker counts it.
    pub(crate) fn count_no_more(&self) -> Option<Withdrawn> {
        self.share.as_ref()?.withdraw(What::Pinned)
    }

    /// Unregisters and unmaps an allocation that the device no longer uses.
    pub(crate) fn unmap(&mut self, driver: &Driver, address: u64) -> CUresult {
        let Some(allocation) = self.allocations.remove(&address) else { return CUDA_ERROR_INVALID_VALUE };
        self.publish();
        // SAFETY: registered and mapped by `map`, once.
        unsafe {
            let result = (driver.cuMemHostUnregister)(address as *mut _);
            if result == CUDA_SUCCESS {
                libc::munmap(address as *mut _, allocation.size as usize);
            } else {
                // The device may still write the pages. They stay mapped in the worker, where the client cannot reach them.
                warn!(address, result, "pinned memory could not be unregistered");
            }
            result
        }
    }
}

/// Whether a file is a memfd of this size whose size cannot change.
pub(crate) fn is_sealed(file: &OwnedFd, size: u64) -> bool {
    // SAFETY: plain system calls on an open descriptor; stat is plain data.
    unsafe {
        let seals = libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS);
        let mut stat: libc::stat = std::mem::zeroed();
        seals >= 0
            && seals & layout::SEALS == layout::SEALS
            && libc::fstat(file.as_raw_fd(), &raw mut stat) == 0
            && stat.st_size as u64 == size
    }
}

fn map_fixed(file: &OwnedFd, address: u64, size: u64, offset: u64, more_flags: i32) -> bool {
    let Ok(offset) = libc::off_t::try_from(offset) else { return false };
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE | more_flags);
    // SAFETY: MAP_FIXED_NOREPLACE replaces nothing.
    let got = unsafe { libc::mmap(address as *mut _, size as usize, protection, flags, file.as_raw_fd(), offset) };
    if got != libc::MAP_FAILED && got as u64 != address {
        // SAFETY: an old kernel took the address as a hint; this mapping is nobody's.
        unsafe { libc::munmap(got, size as usize) };
        return false;
    }
    got != libc::MAP_FAILED
}

/// Maps a file shared at an address that nothing else uses, with all of its pages.
pub(crate) fn map_at(file: &OwnedFd, address: u64, size: u64) -> Option<*mut u8> {
    map_fixed(file, address, size, 0, libc::MAP_POPULATE).then_some(address as *mut u8)
}

/// The same, with pages that come when they are used: those of a new file do not exist yet, and some of them never will.
pub(crate) fn map_as_used(file: &OwnedFd, address: u64, size: u64) -> Option<*mut u8> {
    map_fixed(file, address, size, 0, 0).then_some(address as *mut u8)
}

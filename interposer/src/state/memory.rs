//! Allocations as the process knows them: where an address leads, for copies and pointer attributes.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, RwLock};

use rekindle_cuda_abi::types::*;
use rekindle_wire::free_ranges::FreeRanges;
use rekindle_wire::window;

use crate::process::memfd;

/// An allocation at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Allocation {
    /// Device memory.
    Device { base: u64, size: u64, device: usize, context: CUcontext },
    /// Device memory from a pool, which belongs to no context.
    Pooled { base: u64, size: u64, device: usize, pool: u64 },
    /// Device memory that the program has mapped itself, which belongs to no context.
    Mapping { base: u64, size: u64, device: usize, handle_types: u32 },
    /// Device memory of another process's, which this one has opened.
    Opened { base: u64, size: u64, device: usize, context: CUcontext },
    /// A device global, at an address of the driver's choice.
    Global { base: u64, size: u64, device: usize, context: CUcontext },
    /// Pinned host memory of ours, mapped in both processes.
    Pinned { base: u64, size: u64, flags: u32, context: CUcontext },
    /// Managed memory: in pages of ours that are pinned and mapped in both processes, or device memory whose pages move
    /// (`operations/moving.rs`).
    Managed { base: u64, size: u64, context: CUcontext },
    /// Memory of the application's that it registered. Its pages are in a memfd of that serial number, and the worker
    /// has them at `alias`; or they are where they were, `alias` is 0, and copies go through the bounce buffer.
    Registered { base: u64, size: u64, flags: u32, context: CUcontext, alias: u64, serial: u64 },
    /// The device's view of registered memory.
    Mapped { base: u64, size: u64, host: u64, context: CUcontext },
}

impl Allocation {
    pub(crate) fn base(&self) -> u64 {
        self.range().start
    }

    pub(crate) fn range(&self) -> std::ops::Range<u64> {
        let (Self::Device { base, size, .. }
        | Self::Pooled { base, size, .. }
        | Self::Mapping { base, size, .. }
        | Self::Opened { base, size, .. }
        | Self::Global { base, size, .. }
        | Self::Pinned { base, size, .. }
        | Self::Managed { base, size, .. }
        | Self::Mapped { base, size, .. }
        | Self::Registered { base, size, .. }) = *self;
        base..base + size
    }

    pub(crate) fn context(&self) -> CUcontext {
        match *self {
            Self::Device { context, .. }
            | Self::Opened { context, .. }
            | Self::Global { context, .. }
            | Self::Pinned { context, .. }
            | Self::Managed { context, .. }
            | Self::Mapped { context, .. }
            | Self::Registered { context, .. } => context,
            Self::Pooled { .. } | Self::Mapping { .. } => 0,
        }
    }

    /// Whether it is memory of a device, and of which.
    pub(crate) fn device(&self) -> Option<usize> {
        match *self {
            Self::Device { device, .. }
            | Self::Pooled { device, .. }
            | Self::Mapping { device, .. }
            | Self::Opened { device, .. }
            | Self::Global { device, .. } => Some(device),
            Self::Pinned { .. } | Self::Managed { .. } | Self::Registered { .. } | Self::Mapped { .. } => None,
        }
    }

    /// Whether it is memory of the host.
    pub(crate) fn is_host(&self) -> bool {
        self.device().is_none()
    }

    /// Whether the worker's driver can reach it at this address.
    pub(crate) fn direct(&self) -> bool {
        !matches!(self, Self::Registered { .. })
    }
}

/// An allocation, and what it has as long as it is there.
#[derive(Clone, Copy, Debug)]
struct Entry {
    allocation: Allocation,
    /// No other allocation of this process has it, nor will.
    id: u64,
    /// Whether synchronous calls on it always wait (`CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`).
    synchronous: bool,
}

/// All allocations by address, and how far each device's window is reserved.
pub(crate) struct Memory {
    by_address: RwLock<BTreeMap<u64, Entry>>,
    next_id: AtomicU64,
    /// Whether there is any allocation on which synchronous calls always wait.
    any_synchronous: AtomicBool,
    reserved: Mutex<[u64; window::MAX_DEVICES]>,
    /// The free ranges of the pinned window.
    pinned: Mutex<FreeRanges>,
}

impl Memory {
    pub(crate) fn new() -> Self {
        Self {
            by_address: RwLock::default(),
            next_id: AtomicU64::new(1),
            any_synchronous: AtomicBool::new(false),
            reserved: Mutex::new([0; window::MAX_DEVICES]),
            pinned: Mutex::new(FreeRanges::all(window::pinned())),
        }
    }

    /// The allocation that contains an address.
    pub(crate) fn at(&self, address: u64) -> Option<Allocation> {
        self.entry(address).map(|it| it.allocation)
    }

    fn entry(&self, address: u64) -> Option<Entry> {
        let map = self.by_address.read().ok()?;
        let (_, entry) = map.range(..=address).next_back()?;
        entry.allocation.range().contains(&address).then_some(*entry)
    }

    /// The number of the allocation that contains an address.
    pub(crate) fn id(&self, address: u64) -> Option<u64> {
        self.entry(address).map(|it| it.id)
    }

    /// Whether synchronous calls on the memory at an address always wait for their end.
    pub(crate) fn is_synchronous(&self, address: u64) -> bool {
        self.any_synchronous.load(Relaxed) && self.entry(address).is_some_and(|it| it.synchronous)
    }

    /// Sets whether synchronous calls on the allocation that contains an address always wait. `false` if there is no such
    /// allocation.
    pub(crate) fn set_synchronous(&self, address: u64, synchronous: bool) -> bool {
        let Ok(mut map) = self.by_address.write() else { return false };
        let entry = map.range_mut(..=address).next_back().map(|(_, entry)| entry);
        let Some(entry) = entry.filter(|it| it.allocation.range().contains(&address)) else { return false };
        entry.synchronous = synchronous;
        if synchronous {
            self.any_synchronous.store(true, Relaxed);
        }
        true
    }

    /// Whether a range lies in one allocation that the worker can reach as it is, or in mappings of the program's own
    /// side by side.
    pub(crate) fn is_direct(&self, address: u64, bytes: u64) -> bool {
        self.at(address).is_some_and(|a| a.direct() && bytes <= self.end_of(&a) - address)
    }

    /// The end of the memory that begins with an allocation: mappings of the program may be adjacent.
    fn end_of(&self, allocation: &Allocation) -> u64 {
        let mut end = allocation.range().end;
        if let (Allocation::Mapping { .. }, Ok(map)) = (allocation, self.by_address.read()) {
            while let Some(next @ Allocation::Mapping { .. }) = map.get(&end).map(|it| it.allocation) {
                end = next.range().end;
            }
        }
        end
    }

    /// The address under which the worker reaches a range of host memory, if it does.
    pub(crate) fn reached_at(&self, address: u64, bytes: u64) -> Option<u64> {
        let allocation = self.at(address).filter(|a| bytes <= self.end_of(a) - address)?;
        match allocation {
            Allocation::Registered { base, alias, .. } if alias != 0 => Some(alias + (address - base)),
            other => other.direct().then_some(address),
        }
    }

    /// Whether a range touches an allocation.
    pub(crate) fn meets(&self, address: u64, bytes: u64) -> bool {
        let Ok(map) = self.by_address.read() else { return false };
        let last = map.range(..address.saturating_add(bytes)).next_back();
        last.is_some_and(|(_, it)| it.allocation.range().end > address)
    }

    /// Adds an allocation; one that is there already changes, and stays the same one.
    pub(crate) fn insert(&self, allocation: Allocation) {
        let Ok(mut map) = self.by_address.write() else { return };
        match map.get_mut(&allocation.base()) {
            Some(entry) if entry.allocation.range() == allocation.range() => entry.allocation = allocation,
            _ => {
                let id = self.next_id.fetch_add(1, Relaxed);
                map.insert(allocation.base(), Entry { allocation, id, synchronous: false });
            }
        }
    }

    pub(crate) fn remove(&self, base: u64) -> Option<Allocation> {
        self.by_address.write().ok()?.remove(&base).map(|it| it.allocation)
    }

    /// Whether a context holds pinned memory, registered memory included.
    pub(crate) fn has_pinned(&self, context: CUcontext) -> bool {
        let is = |a: &Allocation| a.is_host() && a.context() == context;
        self.by_address.read().is_ok_and(|map| map.values().any(|it| is(&it.allocation)))
    }

    /// Forgets the allocations of a context, and returns its pinned and registered memory.
    pub(crate) fn forget_context(&self, context: CUcontext) -> Vec<Allocation> {
        let Ok(mut map) = self.by_address.write() else { return Vec::new() };
        let (gone, kept) =
            std::mem::take(&mut *map).into_iter().partition(|(_, it)| it.allocation.context() == context);
        *map = kept;
        let gone: BTreeMap<u64, Entry> = gone;
        gone.into_values().map(|it| it.allocation).filter(Allocation::is_host).collect()
    }

    /// Forgets what came from a device's pools.
    pub(crate) fn forget_pools(&self, device: usize) {
        if let Ok(mut map) = self.by_address.write() {
            map.retain(|_, it| !matches!(&it.allocation, Allocation::Pooled { device: d, .. } if *d == device));
        }
    }

    /// Reserves a device's window up to at least `end`, without access, so that nothing else in the process takes
    /// these addresses. Returns how far it is reserved now, or `None` where something else is there already.
    pub(crate) fn reserve(&self, device: usize, end: u64) -> Option<u64> {
        let range = window::device(device);
        let mut reserved = self.reserved.lock().ok()?;
        let from = reserved[device].max(range.start);
        let to = range.start + (end - range.start).next_multiple_of(window::STEP);
        if to > range.end {
            return None;
        }
        if to > from {
            if !memfd::reserve(from, to - from) {
                return None;
            }
            reserved[device] = to;
        }
        Some(reserved[device])
    }

    /// Whether an address lies in what is reserved for device memory. What else lies in a device's window is the
    /// program's: executables that are loaded anywhere, and their heaps, are in device 13's (0x55.._...._....).
    pub(crate) fn is_reserved(&self, address: u64) -> bool {
        let Some(device) = window::device_of(address) else { return false };
        self.reserved.lock().is_ok_and(|reserved| address < reserved[device])
    }

    /// A free place for pinned memory; the size is a multiple of the page size.
    pub(crate) fn pinned_place(&self, size: u64) -> Option<u64> {
        self.pinned.lock().ok()?.take(size)
    }

    /// Gives a place back.
    pub(crate) fn pinned_free(&self, address: u64, size: u64) {
        if let Ok(mut free) = self.pinned.lock() {
            free.give(address, size);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_finds_the_allocation_that_contains_an_address() {
        let memory = Memory::new();
        memory.insert(Allocation::Device { base: 0x1000, size: 0x1000, device: 0, context: 1 });
        assert_eq!(memory.at(0xfff), None);
        assert_eq!(memory.at(0x1fff).map(|a| a.base()), Some(0x1000));
        assert_eq!(memory.at(0x2000), None);
        assert!(memory.is_direct(0x1000, 0x1000));
        assert!(!memory.is_direct(0x1001, 0x1000));
    }

    #[test]
    fn reserved_addresses_of_a_window_count_as_device_memory() {
        let memory = Memory::new();
        let (heap, device) = (0x563e_b966_3f80, window::device(7));
        assert!(!memory.is_reserved(heap) && !memory.is_reserved(device.start));
        assert_eq!(memory.reserve(7, device.start + 1), Some(device.start + window::STEP));
        assert!(memory.is_reserved(device.start + 5) && !memory.is_reserved(device.start + window::STEP));
        assert!(!memory.is_reserved(heap) && !memory.is_reserved(window::PINNED_BASE));
    }

    #[test]
    fn only_adjacent_mappings_form_one_range() {
        let memory = Memory::new();
        let mapping = |base| Allocation::Mapping { base, size: 0x1000, device: 0, handle_types: 0 };
        [0x1000, 0x2000, 0x4000].into_iter().for_each(|base| memory.insert(mapping(base)));
        memory.insert(Allocation::Device { base: 0x5000, size: 0x1000, device: 0, context: 1 });
        assert!(memory.is_direct(0x1800, 0x1800) && memory.reached_at(0x1800, 0x1800) == Some(0x1800));
        assert!(!memory.is_direct(0x1800, 0x1801) && !memory.is_direct(0x4000, 0x1001));
    }

    #[test]
    fn each_allocation_keeps_a_number_of_its_own() {
        let memory = Memory::new();
        let device = |base| Allocation::Device { base, size: 0x1000, device: 0, context: 1 };
        memory.insert(device(0x1000));
        memory.insert(device(0x2000));
        let (first, second) = (memory.id(0x1000), memory.id(0x2fff));
        assert!(first.is_some() && second.is_some() && first != second);
        // A changed allocation keeps its number.
        memory.insert(Allocation::Device { base: 0x1000, size: 0x1000, device: 0, context: 2 });
        assert_eq!(memory.id(0x1fff), first);
        assert!(memory.set_synchronous(0x1001, true) && memory.is_synchronous(0x1000));
        assert!(!memory.is_synchronous(0x2000) && !memory.set_synchronous(0x3000, true));
        memory.remove(0x1000);
        memory.insert(device(0x1000));
        assert!(![first, second].contains(&memory.id(0x1000)) && !memory.is_synchronous(0x1000));
    }

    #[test]
    fn freed_pinned_places_merge_and_are_reused() {
        let memory = Memory::new();
        let places: Vec<u64> = (0..3).filter_map(|_| memory.pinned_place(0x1000)).collect();
        memory.pinned_free(places[0], 0x1000);
        memory.pinned_free(places[2], 0x1000);
        memory.pinned_free(places[1], 0x1000);
        assert_eq!(memory.pinned_place(0x3000), Some(places[0]));
    }
}

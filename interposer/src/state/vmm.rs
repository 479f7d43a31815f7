//! The program's own virtual memory management: its reservations, its handles of pieces, and their mappings.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::types::*;
use rekindle_wire::window;

use crate::process::memfd;

/// Physical memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// The properties that the program has requested.
    pub(crate) properties: CUmemAllocationProp,
    pub(crate) device: usize,
    /// How often the program has its handle.
    handles: u32,
    mappings: u32,
}

/// A piece at an address.
#[derive(Clone, Debug)]
struct Mapping {
    size: u64,
    piece: u64,
    /// The access rights by the worker's numbers of devices.
    access: BTreeMap<usize, u32>,
}

/// Whether the worker must learn of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tell {
    Nothing,
    /// The first handle exists again, or the last is released.
    Worker,
}

#[derive(Debug, Default)]
struct Inner {
    reservations: BTreeMap<u64, u64>,
    pieces: BTreeMap<u64, Piece>,
    mappings: BTreeMap<u64, Mapping>,
}

/// All of it.
#[derive(Debug, Default)]
pub(crate) struct Vmm(Mutex<Inner>);

impl Vmm {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a reservation: the one that is hinted at, if it is free, or another. Nothing else in the process
    /// gets these addresses until [`Vmm::give`].
    pub(crate) fn take(&self, size: u64, alignment: u64, hint: u64) -> Option<u64> {
        let alignment = alignment.max(MEMORY_GRANULARITY);
        let mut inner = self.inner();
        let hinted = (hint != 0 && hint.is_multiple_of(alignment) && inner.is_free(hint, size)).then_some(hint);
        let mut place = hinted.or_else(|| inner.gap(window::RESERVED_BASE, size, alignment));
        while let Some(address) = place {
            if memfd::reserve(address, size) {
                inner.reservations.insert(address, size);
                return Some(address);
            }
            // Something else is there.
            place = inner.gap(address.checked_add(alignment)?, size, alignment);
        }
        None
    }

    /// Gives a place back.
    pub(crate) fn give(&self, address: u64, size: u64) {
        if self.inner().reservations.remove(&address).is_some() {
            // SAFETY: what `take` has mapped, without access.
            unsafe { libc::munmap(address as *mut _, size as usize) };
        }
    }

    /// Whether exactly this was reserved.
    pub(crate) fn is_reservation(&self, address: u64, size: u64) -> bool {
        self.inner().reservations.get(&address) == Some(&size)
    }

    /// The reservation that holds an address: its beginning and its size.
    pub(crate) fn reservation(&self, address: u64) -> Option<(u64, u64)> {
        let inner = self.inner();
        let (&base, &size) = inner.reservations.range(..=address).next_back()?;
        (address < base + size).then_some((base, size))
    }

    /// Adds a piece, of which the program has one handle.
    pub(crate) fn add(&self, handle: u64, device: usize, properties: CUmemAllocationProp) {
        self.inner().pieces.insert(handle, Piece { properties, device, handles: 1, mappings: 0 });
    }

    /// The piece of a handle that the program has.
    pub(crate) fn piece(&self, handle: u64) -> Option<Piece> {
        self.inner().pieces.get(&handle).filter(|p| p.handles > 0).copied()
    }

    /// Takes one handle of a piece away.
    pub(crate) fn release(&self, handle: u64) -> Option<Tell> {
        let mut inner = self.inner();
        let piece = inner.pieces.get_mut(&handle).filter(|p| p.handles > 0)?;
        piece.handles -= 1;
        let last = piece.handles == 0;
        inner.forget_unused(handle);
        Some(if last { Tell::Worker } else { Tell::Nothing })
    }

    /// Adds a handle of the piece that is mapped at an address.
    pub(crate) fn retain_at(&self, address: u64) -> Option<(u64, Tell)> {
        let mut inner = self.inner();
        let handle = inner.at(address)?.1.piece;
        let piece = inner.pieces.get_mut(&handle)?;
        piece.handles += 1;
        Some((handle, if piece.handles == 1 { Tell::Worker } else { Tell::Nothing }))
    }

    /// A piece has been mapped.
    pub(crate) fn map(&self, address: u64, size: u64, handle: u64) {
        let mut inner = self.inner();
        if let Some(piece) = inner.pieces.get_mut(&handle) {
            piece.mappings += 1;
        }
        inner.mappings.insert(address, Mapping { size, piece: handle, access: BTreeMap::new() });
    }

    /// Everything in a range has been unmapped: the addresses where something was mapped.
    pub(crate) fn unmap(&self, address: u64, size: u64) -> Vec<u64> {
        let mut inner = self.inner();
        let gone: Vec<u64> = inner.mappings.range(address..address + size).map(|(base, _)| *base).collect();
        for base in &gone {
            let Some(mapping) = inner.mappings.remove(base) else { continue };
            if let Some(piece) = inner.pieces.get_mut(&mapping.piece) {
                piece.mappings -= 1;
            }
            inner.forget_unused(mapping.piece);
        }
        gone
    }

    /// A device's access to a range has been set.
    pub(crate) fn set_access(&self, address: u64, size: u64, device: usize, flags: u32) {
        let mut inner = self.inner();
        let mappings = inner.mappings.range_mut(..address + size);
        for (_, mapping) in mappings.filter(|(base, m)| **base + m.size > address) {
            mapping.access.insert(device, flags);
        }
    }

    /// The access rights of a device at an address where a piece is mapped.
    pub(crate) fn access(&self, address: u64, device: usize) -> Option<u32> {
        Some(self.inner().at(address)?.1.access.get(&device).copied().unwrap_or(0))
    }
}

impl Inner {
    fn at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&base, mapping) = self.mappings.range(..=address).next_back()?;
        (address < base + mapping.size).then_some((base, mapping))
    }

    fn forget_unused(&mut self, handle: u64) {
        if self.pieces.get(&handle).is_some_and(|p| p.handles == 0 && p.mappings == 0) {
            self.pieces.remove(&handle);
        }
    }

    fn is_free(&self, address: u64, size: u64) -> bool {
        let window = window::reserved();
        let Some(end) = address.checked_add(size).filter(|end| *end <= window.end) else { return false };
        let before = self.reservations.range(..end).next_back();
        address >= window.start && before.is_none_or(|(base, length)| base + length <= address)
    }

    /// The lowest free place from `from` on.
    fn gap(&self, from: u64, size: u64, alignment: u64) -> Option<u64> {
        let mut at = from.checked_next_multiple_of(alignment)?;
        for (&base, &length) in &self.reservations {
            if base >= at.checked_add(size)? {
                break;
            }
            if base + length > at {
                at = (base + length).checked_next_multiple_of(alignment)?;
            }
        }
        (at.checked_add(size)? <= window::reserved().end).then_some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULE: u64 = MEMORY_GRANULARITY;

    const BASE: u64 = window::RESERVED_BASE;

    #[test]
    fn reservations_take_the_hinted_place_or_a_gap() {
        let vmm = Vmm::default();
        let a = vmm.take(4 * GRANULE, 0, 0).unwrap();
        let b = vmm.take(GRANULE, 8 * GRANULE, 0).unwrap();
        assert_eq!((a, b), (BASE, BASE + 8 * GRANULE));
        assert_eq!(vmm.take(GRANULE, 0, BASE + 5 * GRANULE), Some(BASE + 5 * GRANULE));
        // Taken; and none of ours to give.
        assert_eq!(vmm.take(GRANULE, 0, a), Some(BASE + 4 * GRANULE));
        assert_eq!(vmm.take(GRANULE, 0, 0x7000_0000_0000), Some(BASE + 6 * GRANULE));
        assert_eq!(vmm.take(window::RESERVED_SIZE, 0, 0), None);
        vmm.give(a, 4 * GRANULE);
        assert_eq!(vmm.take(2 * GRANULE, 0, 0), Some(a));
        assert_eq!(vmm.reservation(a + 1), Some((a, 2 * GRANULE)));
        [(a, 2), (b, 1), (BASE + 4 * GRANULE, 1), (BASE + 5 * GRANULE, 1), (BASE + 6 * GRANULE, 1)]
            .into_iter()
            .for_each(|(at, granules)| vmm.give(at, granules * GRANULE));
    }

    #[test]
    fn a_piece_is_forgotten_after_its_last_handle_and_mapping() {
        let vmm = Vmm::default();
        vmm.add(7, 0, CUmemAllocationProp::default());
        vmm.map(BASE, GRANULE, 7);
        vmm.map(BASE + GRANULE, GRANULE, 7);
        assert_eq!(vmm.release(7), Some(Tell::Worker));
        assert_eq!((vmm.release(7), vmm.piece(7).is_some()), (None, false));
        assert_eq!(vmm.retain_at(BASE + 5), Some((7, Tell::Worker)));
        assert_eq!(vmm.retain_at(BASE + GRANULE), Some((7, Tell::Nothing)));
        assert_eq!(vmm.release(7), Some(Tell::Nothing));
        vmm.set_access(BASE, 2 * GRANULE, 1, 3);
        assert_eq!(
            (vmm.access(BASE, 1), vmm.access(BASE, 0), vmm.access(BASE + 2 * GRANULE, 1)),
            (Some(3), Some(0), None)
        );
        assert_eq!(vmm.unmap(BASE, 2 * GRANULE), [BASE, BASE + GRANULE]);
        assert!(vmm.piece(7).is_some());
        assert_eq!(vmm.release(7), Some(Tell::Worker));
        assert!(vmm.piece(7).is_none());
    }
}

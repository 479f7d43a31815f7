//! The client's own virtual memory management: addresses that it has reserved, pieces of physical memory that it has made,
//! and mappings of pieces at addresses.
//!
//! The driver makes only large reservations at the requested address (measured on 580: 64 MiB and more, not 8). So the
//! worker makes one reservation that holds both windows when the first of them is needed, and keeps it. The client's
//! reservations are parts of it.
//!
//! ```text
//!   reservations   ├──────────── addresses ────────────┤      at the client's places in `window::reserved`
//!   mappings          ├─ piece 1 ─┤├─ piece 2 ─┤             each with what devices may do there
//!   pieces         1, 2, 3 ...                                also those that are mapped twice, or nowhere
//! ```
//!
//! A piece lives as long as the client has its handle or a mapping of it. The worker saves and loads the content through a
//! mapping of its own in `window::aliases`, since the client may have no mapping, or none that can be read.

pub(crate) mod aliases;
mod commands;
mod saved;
mod suspend;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::PieceFlags;
use rekindle_wire::ipc::{PieceId, Token};
use rekindle_wire::window;

use crate::gpu::driver::Driver;
use crate::resources::units::{self, Unit, Versioned};

/// A piece of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The driver's handle; 0 in an image, until the piece is made again.
    pub(crate) real: u64,
    pub(crate) size: u64,
    pub(crate) device: usize,
    pub(crate) handle_types: u32,
    pub(crate) flags: PieceFlags,
    /// Whether the client has the piece's handle.
    pub(crate) held: bool,
    pub(crate) sharing: Option<Sharing>,
}

/// The sharing of a piece that other processes may have too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sharing {
    pub(crate) id: PieceId,
    /// Whether the piece came from another process.
    pub(crate) came: bool,
    /// Whether another client's part of the image has the content.
    pub(crate) elsewhere: bool,
}

/// A piece at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapping {
    size: u64,
    piece: u64,
    /// The access of each device, as `CUmemAccess_flags`; at first no device has access.
    access: BTreeMap<usize, u32>,
}

/// The client's reservations, pieces and mappings.
#[derive(Debug, Default)]
pub(crate) struct Vmm {
    reservations: BTreeMap<u64, u64>,
    pub(crate) pieces: BTreeMap<u64, Piece>,
    mappings: Versioned<BTreeMap<u64, Mapping>>,
    /// Pieces that have names.
    pub(crate) exported: BTreeMap<Token, u64>,
    /// Whether the driver keeps the windows free.
    kept: bool,
}

impl Vmm {
    /// The bytes that count towards the client's limit on a device. Pieces that came from other processes count too, since
    /// they exist for as long as this client has them. A piece that the client has twice counts once.
    pub(crate) fn counted(&self, device: usize) -> u64 {
        let mut seen = BTreeSet::new();
        let first = |p: &&Piece| p.device == device && p.sharing.is_none_or(|it| seen.insert(it.id));
        self.pieces.values().filter(first).map(|p| p.size).sum()
    }

    /// Whether the client has the piece of this id.
    pub(crate) fn has(&self, id: &PieceId) -> bool {
        self.pieces.values().any(|p| p.sharing.is_some_and(|it| it.id == *id))
    }

    /// The bytes of pieces on a device that this client saves, unless other processes save them.
    pub(crate) fn bytes(&self, device: usize) -> u64 {
        let own = |p: &&Piece| p.device == device && !p.sharing.is_some_and(|it| it.came);
        self.pieces.values().filter(own).map(|p| p.size).sum()
    }

    /// Whether every byte of a range is mapped.
    pub(crate) fn covers(&self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        let mut at = address;
        while at < end {
            match self.mappings.range(..=at).next_back() {
                Some((base, mapping)) if at < base + mapping.size => at = base + mapping.size,
                _ => return false,
            }
        }
        bytes > 0
    }

    /// The pieces that are mapped in a range, by their handles.
    pub(crate) fn pieces_in(&self, start: u64, end: u64) -> impl Iterator<Item = u64> {
        let mapped = self.mappings.range(..end).rev().take_while(move |(base, m)| *base + m.size > start);
        mapped.map(|(_, mapping)| mapping.piece)
    }

    /// A number that changes whenever mappings may have changed.
    pub(crate) fn version(&self) -> u64 {
        self.mappings.version()
    }

    /// Runs of mappings without a gap.
    pub(crate) fn runs(&self) -> Vec<Unit> {
        units::join(self.mappings.iter().map(|(base, mapping)| (*base, mapping.size)))
    }

    /// Pairs of runs that have a piece in common.
    pub(crate) fn shared_runs(&self) -> Vec<(Unit, Unit)> {
        let mut places: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for (base, mapping) in self.mappings.iter() {
            places.entry(mapping.piece).or_default().push(*base);
        }
        places.retain(|_, bases| bases.len() > 1);
        let runs = if places.is_empty() { Vec::new() } else { self.runs() };
        let run = |base: u64| runs.iter().find(|run| (run.start..run.end).contains(&base)).copied();
        let pairs = places.values().flat_map(|bases| bases.iter().flat_map(|a| bases.iter().map(move |b| (*a, *b))));
        let mut shared: Vec<_> = pairs.filter_map(|(a, b)| Some((run(a)?, run(b)?))).filter(|(a, b)| a != b).collect();
        shared.sort();
        shared.dedup();
        shared
    }

    /// The device that a run's memory is on, where that device may read all of the run and no other process has any of it.
    pub(crate) fn readable(&self, run: &Unit) -> Option<usize> {
        let mut device = None;
        for (_, mapping) in self.mappings.range(run.start..run.end) {
            let piece = self.pieces.get(&mapping.piece)?;
            let owner = piece.device;
            let may = mapping.access.get(&owner).is_some_and(|flags| *flags != 0);
            if !may || piece.sharing.is_some() || device.is_some_and(|device| device != owner) {
                return None;
            }
            device = Some(owner);
        }
        device
    }

    /// Whether a range lies in one reservation.
    fn is_reserved(&self, address: u64, size: u64) -> bool {
        let reservation = self.reservations.range(..=address).next_back();
        let end = address.checked_add(size);
        reservation.zip(end).is_some_and(|((base, length), end)| end <= base + length)
    }

    /// Makes the driver keep both windows free.
    fn keep_windows(&mut self, driver: &Driver) -> Result<(), CUresult> {
        if !self.kept {
            reserve_at(driver, window::RESERVED_BASE, window::RESERVED_SIZE + window::ALIAS_SIZE)?;
            self.kept = true;
        }
        Ok(())
    }

    /// Whether a range touches no reservation.
    fn is_free(&self, address: u64, size: u64) -> bool {
        let before = self.reservations.range(..address.saturating_add(size)).next_back();
        before.is_none_or(|(base, length)| base + length <= address)
    }

    /// Whether anything is mapped in a range.
    fn is_used(&self, address: u64, size: u64) -> bool {
        let before = self.mappings.range(..address.saturating_add(size)).next_back();
        before.is_some_and(|(base, mapping)| base + mapping.size > address)
    }

    /// Releases a piece that has neither a handle nor a mapping.
    fn drop_unused(&mut self, driver: &Driver, handle: u64) -> CUresult {
        let used = self.mappings.values().any(|m| m.piece == handle);
        match self.pieces.get(&handle) {
            Some(piece) if !piece.held && !used => {
                let real = piece.real;
                self.pieces.remove(&handle);
                self.exported.retain(|_, piece| *piece != handle);
                // SAFETY: the driver's own handle, of which nothing is mapped.
                unsafe { (driver.cuMemRelease)(real) }
            }
            _ => CUDA_SUCCESS,
        }
    }
}

/// Whether a range lies in a window.
fn is_in(window: &Range<u64>, address: u64, size: u64) -> bool {
    size > 0 && window.contains(&address) && address.checked_add(size).is_some_and(|end| end <= window.end)
}

/// The properties with which the driver makes a piece.
pub(crate) fn properties(device: CUdevice, handle_types: u32, flags: PieceFlags) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        handle_types,
        location_type: CU_MEM_LOCATION_TYPE_DEVICE,
        location_id: device,
        compression: flags.compression,
        rdma: flags.rdma,
        usage: flags.usage,
        ..Default::default()
    }
}

/// Makes a piece with the driver.
pub(crate) fn create(driver: &Driver, size: u64, properties: &CUmemAllocationProp) -> Result<u64, CUresult> {
    let mut real = 0_u64;
    // SAFETY: the out parameter is a local, the properties live through the call.
    match unsafe { (driver.cuMemCreate)((&raw mut real).cast(), size as usize, properties, 0) } {
        CUDA_SUCCESS => Ok(real),
        error => Err(error),
    }
}

/// Reserves exactly these addresses.
fn reserve_at(driver: &Driver, address: u64, size: u64) -> Result<(), CUresult> {
    let mut got = 0;
    // SAFETY: the out parameter is a local.
    match unsafe { (driver.cuMemAddressReserve)(&raw mut got, size as usize, 0, address, 0) } {
        CUDA_SUCCESS if got == address => Ok(()),
        CUDA_SUCCESS => {
            // SAFETY: what was just reserved, and is of no use.
            unsafe { (driver.cuMemAddressFree)(got, size as usize) };
            Err(CUDA_ERROR_OUT_OF_MEMORY)
        }
        error => Err(error),
    }
}

/// Sets the access of devices to a range.
fn set_access(driver: &Driver, address: u64, size: u64, access: &[CUmemAccessDesc]) -> CUresult {
    // SAFETY: the descriptors live through the call.
    unsafe { (driver.cuMemSetAccess)(address, size as usize, access.as_ptr(), access.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const MIB: u64 = 1 << 20;
    const BASE: u64 = window::RESERVED_BASE;

    /// A client's memory: two pieces, one of which came from another process, mapped at three places.
    pub(super) fn sample() -> Vmm {
        let piece = |real| Piece {
            real,
            size: 2 * MIB,
            device: 1,
            handle_types: 1,
            flags: PieceFlags { compression: 0, rdma: 1, usage: 2 },
            held: real == 7,
            sharing: (real == 8).then_some(Sharing { id: [3; 16], came: true, elsewhere: false }),
        };
        let mapping = |piece| Mapping { size: 2 * MIB, piece, access: BTreeMap::from([(0, 1), (1, 3)]) };
        Vmm {
            reservations: BTreeMap::from([(BASE, 64 * MIB)]),
            pieces: BTreeMap::from([(1, piece(7)), (2, piece(8))]),
            mappings: BTreeMap::from([(BASE, mapping(1)), (BASE + 2 * MIB, mapping(2)), (BASE + 8 * MIB, mapping(1))])
                .into(),
            exported: BTreeMap::from([([5; 16], 1)]),
            kept: false,
        }
    }

    #[test]
    fn what_is_covered_has_no_gap() {
        let vmm = sample();
        assert!(vmm.covers(BASE, 4 * MIB) && vmm.covers(BASE + 3 * MIB, MIB));
        assert!(!vmm.covers(BASE, 4 * MIB + 1) && !vmm.covers(BASE + 6 * MIB, MIB) && !vmm.covers(BASE, 0));
        assert!(!vmm.covers(u64::MAX, 2));
    }

    #[test]
    fn ranges_are_free_or_used_to_the_byte() {
        let vmm = sample();
        assert!(vmm.is_free(BASE + 64 * MIB, MIB) && vmm.is_free(BASE - MIB, MIB));
        assert!(!vmm.is_free(BASE + 64 * MIB - 1, MIB) && !vmm.is_free(BASE - MIB, MIB + 1));
        assert!(!vmm.is_free(BASE - MIB, 66 * MIB) && !vmm.is_free(BASE, u64::MAX));
        assert!(vmm.is_used(BASE, MIB) && vmm.is_used(BASE + 4 * MIB, 5 * MIB) && vmm.is_used(BASE - 1, 2));
        assert!(!vmm.is_used(BASE + 4 * MIB, 4 * MIB) && !vmm.is_used(BASE - MIB, MIB));
    }

    #[test]
    fn what_has_no_gap_is_one_run_and_pieces_tie_runs_together() {
        let vmm = sample();
        let (low, high) = (Unit::new(BASE, 4 * MIB), Unit::new(BASE + 8 * MIB, 2 * MIB));
        assert_eq!(vmm.runs(), [low, high]);
        assert_eq!(vmm.shared_runs(), [(low, high), (high, low)]);
        assert_eq!(vmm.readable(&high), Some(1));
        // A piece of this run came from another process.
        assert_eq!(vmm.readable(&low), None);
    }

    #[test]
    fn what_came_counts_and_what_is_one_piece_counts_once() {
        let mut vmm = sample();
        assert_eq!((vmm.bytes(1), vmm.counted(1), vmm.counted(0)), (2 * MIB, 4 * MIB, 0));
        // The client has its own piece under a second handle.
        vmm.pieces.insert(3, Piece { held: true, ..vmm.pieces[&2] });
        assert_eq!((vmm.bytes(1), vmm.counted(1)), (2 * MIB, 4 * MIB));
        assert!(vmm.has(&[3; 16]) && !vmm.has(&[4; 16]));
    }
}

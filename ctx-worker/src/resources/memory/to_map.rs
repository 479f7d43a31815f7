//! Physical memory that exists, so that no other process can take it, and has its addresses, but is not mapped yet: a thread of its own maps
//! it, and whoever waits for nothing but the memory's being there goes on meanwhile. On an H200 mapping 107 GB takes 20 ms.

use rekindle_cuda_abi::types::{CU_MEM_ACCESS_READWRITE, CUdevice};

use super::access::set_access;
use super::runs::Runs;
use crate::gpu::driver::{CallFailed, Driver, checked};

/// Pieces of a device, in the order of their addresses.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ToMap {
    device: CUdevice,
    pieces: Vec<Made>,
}

/// A piece: the address and the size of its place, and the driver's handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Made {
    pub(super) address: u64,
    pub(super) size: u64,
    pub(super) piece: u64,
}

/// Ranges that are finished together.
#[derive(Debug)]
pub(super) enum Unfinished {
    /// They are mapped, and get their access later.
    Closed(Runs),
    /// Their pieces are mapped later.
    Unmapped(Vec<Made>),
}

impl ToMap {
    pub(super) fn new(device: CUdevice, mut pieces: Vec<Made>) -> Self {
        pieces.sort_unstable_by_key(|it| it.address);
        Self { device, pieces }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.iter().map(|it| it.size).sum()
    }

    /// The first pieces, with so many bytes at least; the others stay here.
    pub(crate) fn split_first(&mut self, bytes: u64) -> Self {
        let mut sum = 0;
        let first = self.pieces.iter().take_while(|it| {
            let is_needed = sum < bytes;
            sum += it.size;
            is_needed
        });
        let rest = self.pieces.split_off(first.count());
        Self { device: self.device, pieces: std::mem::replace(&mut self.pieces, rest) }
    }

    /// Whether an address lies in one of the pieces.
    pub(crate) fn holds(&self, address: u64) -> bool {
        let behind = self.pieces.partition_point(|it| it.address <= address);
        self.pieces[..behind].last().is_some_and(|it| address - it.address < it.size)
    }

    /// Maps the pieces, for their own device. Some context is current in this thread.
    ///
    /// # Errors
    /// Errors of the driver. Then the memory is of no use.
    pub(crate) fn map(&self, driver: &Driver) -> Result<(), CallFailed> {
        let mut runs = Runs::default();
        for Made { address, size, piece } in &self.pieces {
            // SAFETY: a piece of ours, and addresses that are reserved for it.
            checked("cuMemMap", unsafe { (driver.cuMemMap)(*address, *size as usize, 0, *piece, 0) })?;
            runs.add(*address, *size);
        }
        runs.iter()
            .try_for_each(|(base, length)| set_access(driver, base, length, self.device, CU_MEM_ACCESS_READWRITE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn pieces(sizes: &[(u64, u64)]) -> ToMap {
        let made =
            sizes.iter().map(|(address, size)| Made { address: address * MIB, size: size * MIB, piece: *address });
        ToMap::new(3, made.collect())
    }

    #[test]
    fn the_first_pieces_have_as_many_bytes_as_are_wanted_and_all_are_in_one_part() {
        let sizes = [(40, 4), (10, 2), (20, 8), (30, 2)];
        for (wanted, first, rest) in [
            (0, &[][..], &sizes[..]),
            (1, &[(10, 2)], &[(20, 8), (30, 2), (40, 4)]),
            (2, &[(10, 2)], &[(20, 8), (30, 2), (40, 4)]),
            (3, &[(10, 2), (20, 8)], &[(30, 2), (40, 4)]),
            (16, &sizes, &[]),
            (99, &sizes, &[]),
        ] {
            let mut all = pieces(&sizes);
            assert_eq!(all.split_first(wanted * MIB), pieces(first), "{wanted}");
            assert_eq!(all, pieces(rest), "{wanted}");
        }
        assert_eq!(pieces(&sizes).bytes(), 16 * MIB);
    }

    #[test]
    fn an_address_lies_in_a_piece_or_beside_all() {
        let all = pieces(&[(10, 2), (12, 4), (20, 8)]);
        let holds = |address: u64| all.holds(address * MIB);
        assert!([10, 11, 12, 15, 20, 27].into_iter().all(holds));
        assert!(![0, 9, 16, 19, 28].into_iter().any(holds));
        assert!(!pieces(&[]).holds(0));
    }
}

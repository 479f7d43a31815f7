//! Memory that has its addresses, and neither exists nor is mapped yet: a thread of its own makes and maps it, and whoever does not use it
//! goes on meanwhile. On an H200 making 107 GB takes 10 to 40 ms, and mapping it 20.

use rekindle_cuda_abi::types::{CU_MEM_ACCESS_READWRITE, CUdevice};

use super::access::set_access;
use super::create::create;
use super::runs::Runs;
use crate::gpu::driver::{CallFailed, Driver, checked};

/// The driver gives access to about so many bytes at a time: other threads' calls wait meanwhile.
const STEP: u64 = 8 << 30;

/// Pieces of a device, in the order of their addresses.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ToMap {
    device: CUdevice,
    pieces: Vec<Planned>,
}

/// A piece: the address and the size of its place, and the driver's handle of its memory, if that is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Planned {
    pub(super) address: u64,
    pub(super) size: u64,
    pub(super) piece: Option<u64>,
}

/// Ranges that are finished together.
#[derive(Debug)]
pub(super) enum Unfinished {
    /// They are mapped, and get their access later.
    Closed(Runs),
    /// Their memory is made and mapped later.
    Planned(Vec<Planned>),
}

impl ToMap {
    pub(super) fn new(device: CUdevice, mut pieces: Vec<Planned>) -> Self {
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

    /// The pieces of a device whose memory is made, as addresses and the driver's handles.
    pub(super) fn made(&self, device: CUdevice) -> impl Iterator<Item = (u64, u64)> {
        let made = move |it: &Planned| it.piece.filter(|_| device == self.device).map(|piece| (it.address, piece));
        self.pieces.iter().filter_map(made)
    }

    /// Makes the memory of pieces that have none.
    ///
    /// # Errors
    /// Errors of the driver, with the address of the piece. What was made stays.
    pub(crate) fn make(&mut self, driver: &Driver) -> Result<(), (u64, CallFailed)> {
        for Planned { address, size, piece } in &mut self.pieces {
            if piece.is_none() {
                *piece = Some(create(driver, self.device, *size).map_err(|failed| (*address, failed))?);
            }
        }
        Ok(())
    }

    /// Maps the pieces, whose memory is made, for their own device. Some context is current in this thread.
    ///
    /// # Errors
    /// Errors of the driver. Then the memory is of no use.
    pub(crate) fn map(&self, driver: &Driver) -> Result<(), CallFailed> {
        let mut rest = &self.pieces[..];
        while !rest.is_empty() {
            let mut bytes = 0;
            let some = rest.iter().take_while(|it| {
                let fits = bytes < STEP;
                bytes += it.size;
                fits
            });
            let (some, behind) = rest.split_at(some.count());
            self.map_some(driver, some)?;
            rest = behind;
        }
        Ok(())
    }

    fn map_some(&self, driver: &Driver, pieces: &[Planned]) -> Result<(), CallFailed> {
        let mut runs = Runs::default();
        for Planned { address, size, piece } in pieces {
            // SAFETY: a piece of ours, and addresses that are reserved for it.
            let mapped = unsafe { (driver.cuMemMap)(*address, *size as usize, 0, piece.unwrap_or_default(), 0) };
            checked("cuMemMap", mapped)?;
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
            sizes.iter().map(|(address, size)| Planned { address: address * MIB, size: size * MIB, piece: None });
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

//! Physical memory that a suspended client gives back to its device: the addresses stay reserved, and the same addresses get
//! new memory when the client resumes.

use super::{Backing, Borrowed, Cut, DeviceMemory, set_access, unmap_pieces};
use crate::gpu::driver::{CallFailed, Driver};
use rekindle_cuda_abi::types::CU_MEM_ACCESS_READWRITE;

impl DeviceMemory {
    /// The bytes of physical memory behind the client's allocations, less what is borrowed.
    pub(crate) fn physical(&self) -> u64 {
        let all: u64 = self.backings.values().map(|(length, _)| length).sum();
        all.saturating_sub(self.borrowed_bytes())
    }

    /// The ranges that only the client's own device and this process use: the start and the length of each, in order.
    pub(crate) fn own_ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        let all = self.backings.iter().map(|(&base, (length, _))| (base, *length));
        all.filter(|(base, length)| {
            let of_peers = self.shared.range((*base, i32::MIN)..=(*base, i32::MAX));
            self.peers.is_empty()
                && of_peers.count() == 0
                && !self.borrowed.contains_key(base)
                && !self.is_given_away(*base, *length)
        })
    }

    /// Sets the access that the device has to one of these ranges.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn set_own_access(
        &self,
        driver: &Driver,
        (base, length): (u64, u64),
        flags: u32,
    ) -> Result<(), CallFailed> {
        set_access(driver, base, length, self.device, flags)
    }

    /// All physical pieces: address, size, and the driver's handle.
    pub(crate) fn physical_pieces(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        self.backings.iter().flat_map(|(&base, (length, backing))| {
            let pieces = match backing {
                Backing::Large(pieces) => pieces.as_slice(),
                Backing::Slab { piece, .. } => std::slice::from_ref(piece),
            };
            self.cut(*length).pieces().zip(pieces).map(move |((offset, size), &real)| (base + offset, size, real))
        })
    }

    /// Whether other processes may know, or have, a part of this memory.
    pub(crate) fn has_names(&self) -> bool {
        !self.exported.is_empty() || !self.ids.is_empty()
    }

    /// Gives all physical memory back. Nothing uses the memory, and its content is lost. Limits count it as before. What is
    /// borrowed stays if `keep_borrowed` says so; otherwise the allocations are like all others from here on.
    ///
    /// # Errors
    /// The first error of the driver. The memory is of no use then.
    pub(crate) fn release_physical(&mut self, driver: &Driver, keep_borrowed: bool) -> Result<(), CallFailed> {
        let mut result = Ok(());
        for (&base, (length, backing)) in &mut self.backings {
            if keep_borrowed && matches!(self.borrowed.get(&base), Some(Borrowed::Mapped)) {
                continue;
            }
            let pieces = backing.take_pieces();
            let cut = Cut { length: *length, piece_size: self.piece_size };
            result = result.and(unmap_pieces(driver, base, cut, &pieces));
        }
        if !keep_borrowed {
            let all: Vec<u64> = self.borrowed().collect();
            all.into_iter().for_each(|base| self.ends_borrowing(driver, base));
        }
        result
    }

    /// The ranges of addresses that lack physical memory after a suspension: the start and the length of each, in order. What is
    /// borrowed has its memory.
    pub(crate) fn without_physical(&self) -> Vec<(u64, u64)> {
        let all = self.backings.iter().map(|(&base, (length, _))| (base, *length));
        all.filter(|(base, _)| !self.is_read_only(*base)).collect()
    }

    /// Makes new physical memory for some of these ranges, with the access that devices had. Its content is undefined.
    ///
    /// # Errors
    /// The first error of the driver, as a rule a lack of memory. Ranges may have memory, all of which
    /// [`DeviceMemory::release_physical`] gives back.
    pub(crate) fn bring_back_physical(&mut self, driver: &Driver, ranges: &[(u64, u64)]) -> Result<(), CallFailed> {
        ranges.iter().try_for_each(|&(base, length)| self.bring_back(driver, base, length))
    }

    fn bring_back(&mut self, driver: &Driver, base: u64, length: u64) -> Result<(), CallFailed> {
        let mut pieces = Vec::new();
        let mapped = self.map_pieces(driver, base, length, &mut pieces);
        let peers = self.shared.range((base, i32::MIN)..=(base, i32::MAX));
        let mapped = mapped.and_then(|()| {
            peers.copied().try_for_each(|(_, device)| set_access(driver, base, length, device, CU_MEM_ACCESS_READWRITE))
        });
        if let Some((_, backing)) = self.backings.get_mut(&base) {
            backing.put_pieces(pieces);
        }
        mapped
    }
}

impl Backing {
    /// The driver's handles of the pieces, which the backing has no more.
    pub(super) fn take_pieces(&mut self) -> Vec<u64> {
        match self {
            Self::Large(pieces) => std::mem::take(pieces),
            Self::Slab { piece, .. } => Some(std::mem::take(piece)).filter(|piece| *piece != 0).into_iter().collect(),
        }
    }

    pub(super) fn put_pieces(&mut self, made: Vec<u64>) {
        match self {
            Self::Large(pieces) => *pieces = made,
            Self::Slab { piece, .. } => *piece = made.first().copied().unwrap_or(0),
        }
    }
}

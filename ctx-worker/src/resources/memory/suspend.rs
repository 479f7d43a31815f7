//! Physical memory that a suspended client gives back to its device: the addresses stay reserved, and the same addresses get
//! new memory when the client resumes.

use super::runs::Runs;
use super::{Backing, Borrowed, Cut, DeviceMemory, set_access};
use crate::gpu::driver::{CallFailed, Driver, checked};
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
        let (mut mapped, mut pieces) = (Runs::default(), Vec::new());
        for (&base, (length, backing)) in &mut self.backings {
            if keep_borrowed && matches!(self.borrowed.get(&base), Some(Borrowed::Mapped)) {
                continue;
            }
            let of_backing = backing.take_pieces();
            let cut = Cut { length: *length, piece_size: self.piece_size }.pieces().zip(&of_backing);
            cut.for_each(|((offset, size), _)| mapped.add(base + offset, size));
            pieces.extend(of_backing);
        }
        let mut result = Ok(());
        for (base, length) in mapped.iter() {
            // SAFETY: whole mappings of ours, which nothing uses.
            result = result.and(checked("cuMemUnmap", unsafe { (driver.cuMemUnmap)(base, length as usize) }));
        }
        for piece in pieces {
            // SAFETY: the driver's handle of a piece that was mapped there alone.
            result = result.and(checked("cuMemRelease", unsafe { (driver.cuMemRelease)(piece) }));
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
        self.map_many(driver, |memory| {
            ranges.iter().try_for_each(|&(base, length)| {
                let mut pieces = Vec::new();
                let mapped = memory.map_pieces(driver, base, length, &mut pieces);
                if let Some((_, backing)) = memory.backings.get_mut(&base) {
                    backing.put_pieces(pieces);
                }
                mapped
            })
        })?;
        let is_brought = |base: &u64| ranges.binary_search_by_key(base, |it| it.0).is_ok();
        for &(base, peer) in self.shared.iter().filter(|(base, _)| is_brought(base)) {
            let Some((length, _)) = self.backings.get(&base) else { continue };
            set_access(driver, base, *length, peer, CU_MEM_ACCESS_READWRITE)?;
        }
        Ok(())
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

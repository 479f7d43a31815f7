//! Borrowed memory: behind some allocations are physical pieces of a template, which other processes have too. They are mapped
//! for reading only, until the client may write there.
//!
//! | from | to | an allocation |
//! |---|---|---|
//! | `Lent` | `Mapped` | its memory is made |
//! | `Mapped` | `Aside` | `make_own`: it has memory of its own with the same content, and the template's pieces are kept |
//! | `Aside` | `Mapped` | `borrow_again`: nothing was written, and its own memory is given back |
//!
//! From each state it becomes like any other allocation when the template's pieces are let go.
//!
//! Only large allocations are borrowed, whose pieces are theirs alone. Limits count borrowed memory as the client's own.

use super::create::create;
use super::{Borrowed, Cut, DeviceMemory, set_access, unmap_range};
use crate::gpu::driver::{CallFailed, Driver, checked};
use rekindle_cuda_abi::types::*;
use rekindle_wire::control::{Failing, FailureKind};
use rekindle_wire::window::{self, MAX_PIECE};
use thiserror::Error;

/// Why a template is not exported or taken.
#[derive(Debug, Error)]
pub(crate) enum TemplateError {
    #[error("a piece of the template is on a device that does not exist, or is no piece")]
    Unfit,
    #[error("the template's descriptors did not come with it")]
    NoDescriptors,
    #[error("a piece of memory cannot be exported: {}", result_name(*.0))]
    NotExported(CUresult),
    #[error("a piece of the template cannot be imported: {}", result_name(*.0))]
    NotImported(CUresult),
    #[error(transparent)]
    Driver(#[from] CallFailed),
}

impl Failing for TemplateError {
    fn kind(&self) -> FailureKind {
        FailureKind::Internal
    }
}

/// Why an allocation did not get memory of its own.
#[derive(Debug, Error)]
pub(crate) enum OwnError {
    /// The allocation is as it was.
    #[error("there is no memory for what the client writes: {0}")]
    NotMade(CallFailed),
    /// The allocation has no memory.
    #[error("memory cannot be exchanged: {0}")]
    Lost(CallFailed),
}

impl DeviceMemory {
    /// Has these pieces, which cover an allocation that is not made yet, mapped there in place of new ones.
    pub(crate) fn lend(&mut self, base: u64, pieces: Vec<u64>) {
        self.borrowed.insert(base, Borrowed::Lent(pieces));
        self.borrowed_version += 1;
    }

    /// Whether no allocation depends on borrowed pieces.
    pub(crate) fn borrows_nothing(&self) -> bool {
        self.borrowed.is_empty()
    }

    /// Increases whenever the answers of the functions below may change.
    pub(crate) fn borrowed_version(&self) -> u64 {
        self.borrowed_version
    }

    /// The allocations behind which a template's pieces are, or were since nobody has written there.
    pub(crate) fn borrowed(&self) -> impl Iterator<Item = u64> {
        self.borrowed.keys().copied()
    }

    /// Whether an address lies in an allocation behind which a template's pieces are, or were since nobody has written there.
    /// Returns that allocation.
    pub(crate) fn borrowed_at(&self, address: u64) -> Option<u64> {
        let base = *self.borrowed.range(..=address).next_back()?.0;
        let (length, _) = self.backings.get(&base)?;
        (address - base < *length).then_some(base)
    }

    /// Whether an allocation is mapped for reading only.
    pub(crate) fn is_read_only(&self, base: u64) -> bool {
        matches!(self.borrowed.get(&base), Some(Borrowed::Mapped))
    }

    /// Bytes of allocations behind which the template's pieces are.
    pub(crate) fn borrowed_bytes(&self) -> u64 {
        let mapped = self.borrowed.iter().filter(|(_, it)| !matches!(it, Borrowed::Aside(_)));
        mapped.filter_map(|(base, _)| Some(self.backings.get(base)?.0)).sum()
    }

    /// Maps the pieces that are lent for this range, if there are such. Returns them.
    pub(super) fn map_lent(&mut self, driver: &Driver, base: u64, length: u64) -> Option<Result<Vec<u64>, CallFailed>> {
        let borrowed = self.borrowed.get_mut(&base)?;
        let Borrowed::Lent(pieces) = std::mem::replace(borrowed, Borrowed::Mapped) else { return None };
        let mapped = map_existing(driver, (base, self.cut(length)), &pieces, self.device, CU_MEM_ACCESS_READ);
        Some(mapped.map(|()| pieces.clone()).inspect_err(|_| {
            self.borrowed.remove(&base);
            release(driver, &pieces);
        }))
    }

    /// Lets go of the template's pieces that are not mapped at the base: the allocation there is like any other, or no more.
    pub(crate) fn ends_borrowing(&mut self, driver: &Driver, base: u64) {
        self.borrowed_version += 1;
        if let Some(Borrowed::Lent(pieces) | Borrowed::Aside(pieces)) = self.borrowed.remove(&base) {
            release(driver, &pieces);
        }
    }

    /// Gives a borrowed allocation back before there is a client: it has no memory, like those that are not borrowed. Returns the
    /// addresses, the sizes and the handles of its pieces.
    pub(crate) fn give_back_borrowed(
        &mut self,
        driver: &Driver,
        base: u64,
    ) -> Result<Vec<(u64, u64, u64)>, CallFailed> {
        if !self.is_read_only(base) {
            return Ok(Vec::new());
        }
        let Some((length, backing)) = self.backings.get_mut(&base) else { return Ok(Vec::new()) };
        let (length, pieces) = (*length, backing.take_pieces());
        self.borrowed.remove(&base);
        unmap_range(driver, base, self.cut(length))?;
        Ok(self.cut(length).pieces().zip(pieces).map(|((offset, size), piece)| (base + offset, size, piece)).collect())
    }

    /// Makes memory of its own for a borrowed allocation, with the same content. No command uses the allocation meanwhile. `copy`
    /// copies within the device, and has copied when it returns.
    pub(crate) fn make_own(
        &mut self,
        driver: &Driver,
        (ordinal, base): (usize, u64),
        copy: &mut dyn FnMut(u64, u64, u64) -> Result<(), CallFailed>,
    ) -> Result<(), OwnError> {
        if !self.is_read_only(base) {
            return Ok(());
        }
        let Some(&(length, _)) = self.backings.get(&base) else { return Ok(()) };
        let mut own = Vec::new();
        let made = self.cut(length).pieces().try_for_each(|(offset, size)| {
            own.push(self.copied_piece(driver, ordinal, (base + offset, size), copy)?);
            Ok(())
        });
        if let Err(failed) = made {
            release(driver, &own);
            return Err(OwnError::NotMade(failed));
        }
        let lent = self.exchange(driver, base, own, CU_MEM_ACCESS_READWRITE).map_err(OwnError::Lost)?;
        self.borrowed.insert(base, Borrowed::Aside(lent));
        self.borrowed_version += 1;
        Ok(())
    }

    /// Borrows an allocation again that has memory of its own, if `is_same` says that the template's content, which is mapped by
    /// then, is the allocation's. No command uses the allocation meanwhile. Returns whether it is borrowed.
    ///
    /// # Errors
    /// The allocation has no memory.
    pub(crate) fn borrow_again(
        &mut self,
        driver: &Driver,
        base: u64,
        is_same: impl FnOnce() -> bool,
    ) -> Result<bool, CallFailed> {
        let Some(Borrowed::Aside(lent)) = self.borrowed.remove(&base) else { return Ok(false) };
        let own = self.exchange(driver, base, lent, CU_MEM_ACCESS_READ)?;
        let same = is_same();
        if same {
            self.borrowed.insert(base, Borrowed::Mapped);
            self.borrowed_version += 1;
            release(driver, &own);
        } else {
            let lent = self.exchange(driver, base, own, CU_MEM_ACCESS_READWRITE)?;
            release(driver, &lent);
        }
        Ok(same)
    }

    /// A new piece with the content of a mapped one.
    fn copied_piece(
        &self,
        driver: &Driver,
        ordinal: usize,
        (from, size): (u64, u64),
        copy: &mut dyn FnMut(u64, u64, u64) -> Result<(), CallFailed>,
    ) -> Result<u64, CallFailed> {
        // Behind all clones.
        let at = window::clones(ordinal).end - MAX_PIECE;
        let piece = create(driver, self.device, size)?;
        let mapped = map_existing(driver, (at, self.cut(size)), &[piece], self.device, CU_MEM_ACCESS_READWRITE);
        let copied = mapped.and_then(|()| {
            let copied = copy(from, at, size);
            copied.and(unmap_range(driver, at, self.cut(size)))
        });
        copied.map(|()| piece).inspect_err(|_| release(driver, &[piece]))
    }

    /// Maps other pieces in the place of an allocation's. Returns the former ones.
    fn exchange(&mut self, driver: &Driver, base: u64, pieces: Vec<u64>, access: u32) -> Result<Vec<u64>, CallFailed> {
        let missing = CallFailed { call: "exchanging memory", code: CUDA_ERROR_INVALID_VALUE };
        let (length, backing) = self.backings.get_mut(&base).ok_or(missing)?;
        if let Some(copying) = &self.kept {
            copying.let_go(base, base + *length);
        }
        let (length, former) = (*length, backing.take_pieces());
        unmap_range(driver, base, self.cut(length))?;
        map_existing(driver, (base, self.cut(length)), &pieces, self.device, access)?;
        if let Some((_, backing)) = self.backings.get_mut(&base) {
            backing.put_pieces(pieces);
        }
        let mut peers = self.shared.range((base, i32::MIN)..=(base, i32::MAX));
        peers.try_for_each(|&(_, peer)| set_access(driver, base, length, peer, access))?;
        Ok(former)
    }

    /// The access that other devices get to a backing.
    pub(super) fn peer_access(&self, base: u64) -> u32 {
        if self.is_read_only(base) { CU_MEM_ACCESS_READ } else { CU_MEM_ACCESS_READWRITE }
    }
}

/// Maps pieces side by side. After a failure nothing is mapped.
fn map_existing(
    driver: &Driver,
    (base, cut): (u64, Cut),
    pieces: &[u64],
    device: CUdevice,
    access: u32,
) -> Result<(), CallFailed> {
    let mut end = 0;
    let mapped = cut.pieces().zip(pieces).try_for_each(|((offset, size), &piece)| {
        // SAFETY: a handle of ours, at addresses of our own that nothing is mapped at.
        checked("cuMemMap", unsafe { (driver.cuMemMap)(base + offset, size as usize, 0, piece, 0) })?;
        end = offset + size;
        Ok(())
    });
    mapped.and_then(|()| set_access(driver, base, cut.length, device, access)).inspect_err(|_| {
        // The first error is the reason.
        let _ = unmap_range(driver, base, Cut { length: end, ..cut });
    })
}

fn release(driver: &Driver, pieces: &[u64]) {
    for &piece in pieces {
        // SAFETY: a handle of ours, which is used no more. What is mapped stays mapped.
        unsafe { (driver.cuMemRelease)(piece) };
    }
}

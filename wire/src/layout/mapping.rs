//! A process's mapping of the shared memory.

use super::content::{
    CALL_FUNCTIONS, CALL_STRIPES, CALLS_AT, CHUNKS, CHUNKS_AT, Header, REPLIES, REPLIES_AT, ReplySlot, SEQS_AT, UNIT,
    UNITS, UNITS_AT,
};
use crate::sync::{AtomicU32, AtomicU64};

/// A mapping of the shared memory. `Copy`: it is an address whose owner keeps it mapped.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    base: *mut u8,
}

// SAFETY: everything behind the address is atomic, or handed over by atomics (units by `seq`, payloads by `state`).
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// # Safety
    /// `base` is a mapping of at least [`super::SHARED_SIZE`] bytes, page-aligned, shared, readable and writable, that stays
    /// mapped as long as this or a copy of it is used, and whose file cannot shrink.
    pub unsafe fn new(base: *mut u8) -> Self {
        Self { base }
    }

    /// The header.
    pub fn header(&self) -> &Header {
        const { assert!(size_of::<Header>() <= SEQS_AT) };
        // SAFETY: `new` promises the mapping; every field is an atomic, valid for any bit pattern.
        unsafe { &*self.base.cast::<Header>() }
    }

    /// The ticket that the content of a unit belongs to, plus one.
    pub fn seq(&self, unit: usize) -> &AtomicU64 {
        assert!(unit < UNITS);
        // SAFETY: inside the mapping by the assertion; aligned; atomic.
        unsafe { &*self.base.add(SEQS_AT).cast::<AtomicU64>().add(unit) }
    }

    /// The ring's first byte.
    pub fn units(&self) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.base.add(UNITS_AT) }
    }

    /// A reply slot.
    pub fn reply(&self, slot: usize) -> &ReplySlot {
        assert!(slot < REPLIES);
        // SAFETY: inside the mapping by the assertion; aligned; atomics, and a payload behind an UnsafeCell.
        unsafe { &*self.base.add(REPLIES_AT).cast::<ReplySlot>().add(slot) }
    }

    /// The state of a staging chunk: 0 at rest, see [`crate::reply`] for the others.
    pub fn chunk(&self, chunk: usize) -> &AtomicU32 {
        assert!(chunk < CHUNKS);
        // SAFETY: inside the mapping by the assertion; aligned; atomic.
        unsafe { &*self.base.add(CHUNKS_AT).cast::<AtomicU32>().add(chunk) }
    }

    /// A stripe of the counts of calls, see [`crate::calls`].
    pub fn calls(&self, stripe: usize) -> &[AtomicU64; CALL_FUNCTIONS] {
        assert!(stripe <= CALL_STRIPES);
        // SAFETY: inside the mapping by the assertion; aligned; atomics.
        unsafe { &*self.base.add(CALLS_AT).cast::<[AtomicU64; CALL_FUNCTIONS]>().add(stripe) }
    }

    /// The address at which the mapping begins.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Copies bytes into the units, from byte `at` of the ring on and over its end.
    ///
    /// # Safety
    /// The units that this covers belong to the caller; there are at most [`super::MAX_COMMAND`] bytes.
    #[inline]
    pub(crate) unsafe fn store(&self, at: usize, bytes: &[u8]) {
        let start = at % (UNITS * UNIT);
        let first = bytes.len().min(UNITS * UNIT - start);
        // SAFETY: start + first is at most the ring's size, and the rest starts at 0; the caller owns these bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.units().add(start), first);
            std::ptr::copy_nonoverlapping(bytes.as_ptr().add(first), self.units(), bytes.len() - first);
        }
    }

    /// Copies bytes out of the units, from byte `at` of the ring on and over its end.
    ///
    /// # Safety
    /// `into` has room for `length` bytes, at most [`super::MAX_COMMAND`].
    #[inline]
    pub(crate) unsafe fn load(&self, at: usize, into: *mut u8, length: usize) {
        let start = at % (UNITS * UNIT);
        let first = length.min(UNITS * UNIT - start);
        // SAFETY: both parts lie in the ring, which is at least as large as any command.
        unsafe {
            std::ptr::copy_nonoverlapping(self.units().add(start), into, first);
            std::ptr::copy_nonoverlapping(self.units(), into.add(first), length - first);
        }
    }
}

#[cfg(test)]
pub(crate) fn heap() -> Shared {
    let layout = std::alloc::Layout::from_size_align(super::SHARED_SIZE, 4096).unwrap();
    // SAFETY: the layout has a size; the memory is leaked, so it stays.
    unsafe { Shared::new(std::alloc::alloc_zeroed(layout)) }
}

//! The stage: host memory in which pieces of device memory lie on their way into a data file.
//!
//! If the stage has room, the device's memory may be written again as soon as the link has brought it here, and files are
//! written at their own speed. The daemon allocates the stage and writes to all of its pages at its start, since fresh pages
//! are slow, and lends parts of it (units) to a worker before a quiesce. A unit is shared with the daemon alone: no worker can
//! read the copies of another.
//!
//! The stage is not registered with the driver. Registering would take a sixth of a second per GB and hold up the client's
//! calls, while copying from a lane's pinned buffer takes a lane less time than the link needs for the pieces of all lanes.

use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rekindle_images::PIECE_LENGTH;
use rekindle_wire::control::{Failing, FailureKind};
use thiserror::Error;

use crate::resources::pinned::{is_sealed, map_at};

/// Where units are mapped: behind ring and staging of the client, see `serve/start.rs`.
const STAGE_AT: u64 = 0x7010_0000_0000;
const STAGE_SIZE: u64 = 1 << 40;
/// The end of that range.
pub(super) const STAGE_END: u64 = STAGE_AT + STAGE_SIZE;

/// Reasons why units that the daemon lends are not taken.
#[derive(Debug, Error)]
pub(crate) enum StageError {
    #[error("the stage is in use")]
    InUse,
    #[error("the stage cannot have units of {0} bytes")]
    Unit(u64),
    #[error("unit {0} of the stage has not come")]
    Missing(u64),
    #[error("unit {number} of the stage is not a sealed memfd of {unit} bytes, or came twice")]
    NotSealed { number: u64, unit: u64 },
    #[error("the stage is full")]
    Full,
    #[error("unit {0} of the stage cannot be mapped")]
    NotMapped(u64),
}

impl Failing for StageError {
    fn kind(&self) -> FailureKind {
        FailureKind::Internal
    }
}

/// The host memory that the daemon has lent to a worker.
#[derive(Clone, Default)]
pub(crate) struct Stage(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    /// Bytes per unit.
    unit: u64,
    /// Units by number, each with the place at which it is mapped, counted in units.
    mapped: BTreeMap<u64, u64>,
    /// Addresses of unused slots.
    free: Vec<u64>,
    /// The number of slots in use.
    taken: usize,
    /// No slot is to be taken any more, and all units go back when no slot is in use.
    ends: bool,
}

/// A place for one piece, of [`PIECE_LENGTH`] bytes. Returned when dropped.
pub(crate) struct Slot {
    address: u64,
    stage: Stage,
}

impl Stage {
    /// Sets the units that the stage consists of; new units come with their files. Only possible while no slot is in use.
    pub(crate) fn set(&self, unit: u64, units: &[u64], new: Vec<(u64, OwnedFd)>) -> Result<(), StageError> {
        let mut inner = self.lock();
        let set = inner.set(unit, units, new);
        if set.is_err() {
            // The lender does not know which units the stage has now.
            inner.ends = true;
            inner.end_if_unused();
        }
        set
    }

    /// A slot for one piece, if there is room.
    pub(crate) fn take(&self) -> Option<Slot> {
        let mut inner = self.lock();
        if inner.ends {
            return None;
        }
        let address = inner.free.pop()?;
        inner.taken += 1;
        Some(Slot { address, stage: self.clone() })
    }

    /// Called when the lender is gone: all units go back as soon as no slot is in use.
    pub(crate) fn end(&self) {
        let mut inner = self.lock();
        inner.ends = true;
        inner.end_if_unused();
    }

    /// Whether the stage has no room at all.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        let inner = self.lock();
        inner.mapped.is_empty() || inner.ends
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn set(&mut self, unit: u64, units: &[u64], new: Vec<(u64, OwnedFd)>) -> Result<(), StageError> {
        if self.taken > 0 {
            return Err(StageError::InUse);
        }
        if self.unit != unit {
            self.unmap_but(&[]);
        }
        self.unmap_but(units);
        if !units.is_empty() && (unit == 0 || !unit.is_multiple_of(PIECE_LENGTH) || unit > STAGE_SIZE) {
            return Err(StageError::Unit(unit));
        }
        (self.unit, self.ends) = (unit, false);
        for (number, file) in new {
            self.map(number, &file)?;
        }
        match units.iter().find(|number| !self.mapped.contains_key(number)) {
            Some(missing) => Err(StageError::Missing(*missing)),
            None => Ok(()),
        }
    }

    fn map(&mut self, number: u64, file: &OwnedFd) -> Result<(), StageError> {
        let unit = self.unit;
        if self.mapped.contains_key(&number) || !is_sealed(file, unit) {
            return Err(StageError::NotSealed { number, unit });
        }
        let free = (0..STAGE_SIZE / unit).find(|place| !self.mapped.values().any(|taken| taken == place));
        let place = free.ok_or(StageError::Full)?;
        let address = STAGE_AT + place * unit;
        map_at(file, address, unit).ok_or(StageError::NotMapped(number))?;
        self.mapped.insert(number, place);
        self.free.extend((address..address + unit).step_by(PIECE_LENGTH as usize));
        Ok(())
    }

    /// Unmaps all units but these. No slot of the unmapped units is in use.
    fn unmap_but(&mut self, kept: &[u64]) {
        let unit = self.unit;
        let free = &mut self.free;
        self.mapped.retain(|number, place| {
            let address = STAGE_AT + *place * unit;
            let keep = kept.contains(number);
            if !keep {
                free.retain(|slot| !(address..address + unit).contains(slot));
                // SAFETY: mapped by `map`, and no slot of it is taken.
                unsafe { libc::munmap(address as *mut _, unit as usize) };
            }
            keep
        });
    }

    fn end_if_unused(&mut self) {
        if self.ends && self.taken == 0 {
            self.unmap_but(&[]);
        }
    }
}

impl Slot {
    /// The address of the slot, with [`PIECE_LENGTH`] bytes, valid as long as the slot lives.
    pub(crate) fn place(&self) -> *mut u8 {
        self.address as *mut u8
    }

    /// Copies this content into the slot, past the cache: it is read much later.
    ///
    /// # Panics
    /// If the content is longer than a piece.
    pub(crate) fn fill(&mut self, content: &[u8]) {
        assert!(content.len() as u64 <= PIECE_LENGTH);
        let (vectors, rest) = content.as_chunks::<16>();
        let to = self.place().cast::<__m128i>();
        // SAFETY: mapped as long as a slot of it is taken, of a file that cannot shrink, and this slot's alone in this
        // process. It begins at a multiple of its length and has room for all that is put there. Of the only other that
        // has it, the daemon, it is trusted not to write.
        unsafe {
            for (i, vector) in vectors.iter().enumerate() {
                _mm_stream_si128(to.add(i), _mm_loadu_si128(vector.as_ptr().cast()));
            }
            std::ptr::copy_nonoverlapping(rest.as_ptr(), to.add(vectors.len()).cast(), rest.len());
            _mm_sfence();
        }
    }

    /// The first `length` bytes of the slot.
    ///
    /// # Panics
    /// If that is longer than a piece.
    pub(crate) fn bytes(&self, length: u64) -> &[u8] {
        assert!(length <= PIECE_LENGTH);
        // SAFETY: as above, and nobody writes to it while it is borrowed.
        unsafe { std::slice::from_raw_parts(self.place(), length as usize) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut inner = self.stage.lock();
        inner.taken -= 1;
        inner.free.push(self.address);
        inner.end_if_unused();
    }
}

/// A queue: elements leave in the order in which they came.
pub(crate) struct Queue<T>(Mutex<VecDeque<T>>);

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Queue<T> {
    /// Adds an element.
    pub(crate) fn push(&self, one: T) {
        self.lock().push_back(one);
    }

    /// Removes the oldest element, if there is one.
    pub(crate) fn pop(&self) -> Option<T> {
        self.lock().pop_front()
    }

    /// Whether the queue is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::checkpoint::engine::unit::written_memfd;

    const UNIT: u64 = 2 * PIECE_LENGTH;
    /// All stages are mapped at the same addresses, so tests take turns.
    static ALONE: Mutex<()> = Mutex::new(());

    pub(crate) fn alone() -> MutexGuard<'static, ()> {
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn unit() -> OwnedFd {
        written_memfd(c"unit", UNIT).unwrap()
    }

    fn is_mapped(place: u64) -> bool {
        let mut resident = [0_u8; 1];
        // SAFETY: asks about one page, and writes one byte.
        unsafe { libc::mincore((STAGE_AT + place * UNIT) as *mut _, 4096, resident.as_mut_ptr()) == 0 }
    }

    #[test]
    fn units_come_stay_and_go() {
        let _alone = alone();
        let stage = Stage::default();
        assert!(stage.is_empty() && stage.take().is_none());
        stage.set(UNIT, &[5, 7], vec![(5, unit()), (7, unit())]).unwrap();
        let mut slots: Vec<_> = std::iter::from_fn(|| stage.take()).collect();
        assert_eq!(slots.len(), 4);
        // Whole pieces, and lengths that are not aligned.
        let length = |byte: u8| PIECE_LENGTH - u64::from(byte - 1) * 4099;
        for (byte, slot) in (1..).zip(&mut slots) {
            slot.fill(&vec![byte; length(byte) as usize]);
        }
        for (byte, slot) in (1..).zip(&slots) {
            assert!(slot.bytes(length(byte)).iter().all(|it| *it == byte));
            assert!(slot.bytes(PIECE_LENGTH)[length(byte) as usize..].iter().all(|it| *it == 0));
        }
        // Units cannot be changed while a slot is in use.
        assert!(matches!(stage.set(UNIT, &[], vec![]), Err(StageError::InUse)));
        slots.pop();
        assert!(stage.take().is_none() && is_mapped(0));
        drop(slots);
        assert!(stage.is_empty() && !is_mapped(0) && !is_mapped(1));
        stage.set(UNIT, &[7, 9], vec![(7, unit()), (9, unit())]).unwrap();
        stage.set(UNIT, &[9], vec![]).unwrap();
        assert_eq!(std::iter::from_fn(|| stage.take()).collect::<Vec<_>>().len(), 2);
        stage.set(UNIT, &[], vec![]).unwrap();
        assert!(stage.is_empty() && !is_mapped(0) && !is_mapped(1));
    }

    #[test]
    fn what_was_not_taken_whole_is_not_used() {
        let _alone = alone();
        let stage = Stage::default();
        let unsealed = tempfile::tempfile().unwrap().into();
        assert!(stage.set(UNIT, &[1, 2], vec![(1, unit()), (2, unsealed)]).is_err());
        assert!(stage.take().is_none() && stage.is_empty() && !is_mapped(0));
        stage.set(UNIT, &[1], vec![(1, unit())]).unwrap();
        assert!(matches!(stage.set(UNIT, &[1, 8], vec![]), Err(StageError::Missing(8))));
        assert!(stage.take().is_none() && !is_mapped(0));
    }

    #[test]
    fn it_goes_back_with_the_last_piece_when_its_lender_is_gone() {
        let _alone = alone();
        let stage = Stage::default();
        stage.set(UNIT, &[1], vec![(1, unit())]).unwrap();
        let slot = stage.take().unwrap();
        stage.end();
        assert!(stage.take().is_none() && is_mapped(0));
        drop(slot);
        assert!(!is_mapped(0) && stage.is_empty());
        // The next lender.
        stage.set(UNIT, &[1], vec![(1, unit())]).unwrap();
        assert!(stage.take().is_some());
        stage.end();
    }

    #[test]
    fn what_could_shrink_is_not_taken() {
        let _alone = alone();
        let stage = Stage::default();
        let unsealed = tempfile::tempfile().unwrap().into();
        assert!(matches!(stage.set(UNIT, &[1], vec![(1, unsealed)]), Err(StageError::NotSealed { number: 1, .. })));
        assert!(matches!(stage.set(4096, &[1], vec![(1, unit())]), Err(StageError::Unit(4096))));
        assert!(stage.is_empty());
    }
}

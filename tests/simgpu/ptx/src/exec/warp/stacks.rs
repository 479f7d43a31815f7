//! The stacks of a warp's lanes, on which functions have their variables.

use crate::exec::machine::{LANES, LocalMemory};

/// The lanes' stacks, one after the other.
#[derive(Default)]
pub(super) struct Stacks {
    cells: Vec<u64>,
    /// The bytes of each lane's stack.
    bytes: u32,
}

impl Stacks {
    /// Fills the stacks with zeros.
    pub(super) fn clear(&mut self) {
        self.cells.fill(0);
    }

    /// Makes each lane's stack at least this large.
    pub(super) fn reserve(&mut self, bytes: u32) {
        if bytes <= self.bytes {
            return;
        }
        let bytes = bytes.next_multiple_of(16).max(self.bytes.saturating_mul(2));
        let (old, new) = ((self.bytes / 8) as usize, (bytes / 8) as usize);
        let mut cells = vec![0; new * LANES];
        for lane in 0..LANES {
            cells[lane * new..][..old].copy_from_slice(&self.cells[lane * old..][..old]);
        }
        self.cells = cells;
        self.bytes = bytes;
    }

    /// Copies bytes within the stack of a lane.
    pub(super) fn copy(&mut self, lane: usize, from: u32, to: u32, bytes: u32) {
        let stride = self.bytes as usize;
        let len = self.cells.len() * 8;
        let (from, to) = (lane * stride + from as usize, lane * stride + to as usize);
        let bytes = bytes as usize;
        debug_assert!(from + bytes <= len && to + bytes <= len);
        if from + bytes > len || to + bytes > len {
            return;
        }
        let start = self.cells.as_mut_ptr().cast::<u8>();
        // SAFETY: both ranges were checked to lie within the cells.
        unsafe { std::ptr::copy(start.add(from), start.add(to), bytes) };
    }

    /// The stacks in the form that instructions access, in a function whose variables begin at `frame`.
    pub(super) fn local(&mut self, frame: u32) -> LocalMemory {
        LocalMemory { start: self.cells.as_mut_ptr().cast(), stride: u64::from(self.bytes), frame: u64::from(frame) }
    }
}

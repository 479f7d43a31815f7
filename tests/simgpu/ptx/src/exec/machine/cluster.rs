//! A cluster: blocks that are resident together, wait for each other, and reach each other's shared memory.
//!
//! ```text
//!   an address of shared memory     0 | offset          the block's own
//!                            rank + 1 | offset          that of the block of this rank, by `mapa`
//! ```

use std::cell::{Cell, RefCell};

/// The bits of an address of shared memory below those that name a block.
pub(crate) const RANK_SHIFT: u32 = 24;

/// The state that the blocks of a cluster share.
#[derive(Debug, Default)]
pub(crate) struct Cluster {
    /// The shared memory of each block, by rank, and its length.
    shared: RefCell<Vec<(*mut u8, u64)>>,
    /// The cluster's threads, including those that have ended.
    threads: Cell<u32>,
    /// The number of times that the barrier has opened.
    phase: Cell<u32>,
    arrived: Cell<u32>,
    ended: Cell<u32>,
    /// Blocks that have not ended.
    pub(crate) blocks: Cell<u32>,
}

impl Cluster {
    /// Starts again, without blocks.
    pub(crate) fn restart(&self) {
        self.shared.borrow_mut().clear();
        for count in [&self.threads, &self.phase, &self.arrived, &self.ended, &self.blocks] {
            count.set(0);
        }
    }

    /// Adds the next block. Its memory must stay in its place as long as the cluster exists.
    pub(crate) fn add(&self, shared: *mut u8, bytes: u64, threads: u32) {
        self.shared.borrow_mut().push((shared, bytes));
        self.threads.set(self.threads.get() + threads);
        self.blocks.set(self.blocks.get() + 1);
    }

    /// Some threads arrive at the barrier.
    pub(crate) fn arrive(&self, threads: u32) {
        self.arrived.set(self.arrived.get() + threads);
        self.open();
    }

    /// Some threads end, so the barrier does not wait for them any more. `arrived` of them have arrived without waiting.
    pub(crate) fn end(&self, threads: u32, arrived: u32) {
        self.ended.set(self.ended.get() + threads);
        self.arrived.set(self.arrived.get() - arrived.min(self.arrived.get()));
        self.open();
    }

    fn open(&self) {
        if self.arrived.get() > 0 && self.arrived.get() + self.ended.get() >= self.threads.get() {
            self.arrived.set(0);
            self.phase.set(self.phase.get() + 1);
        }
    }

    /// The number of times that the barrier has opened.
    pub(crate) fn phase(&self) -> u32 {
        self.phase.get()
    }

    /// The host's address of an address in another block's shared memory, if it is one.
    pub(crate) fn pointer(&self, addr: u64, len: u64) -> Option<*mut u8> {
        let rank = (addr >> RANK_SHIFT).checked_sub(1)?;
        let (shared, bytes) = *self.shared.borrow().get(usize::try_from(rank).ok()?)?;
        let offset = addr & ((1 << RANK_SHIFT) - 1);
        (offset < bytes && bytes - offset >= len).then(|| shared.wrapping_add(offset as usize))
    }
}

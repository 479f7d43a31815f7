//! Memory of graphs. Its address is fixed when the allocation node is made; the memory is allocated from a launch of that node
//! until a free, which may be a node or a call of the application's.
//!
//! ```text
//!   node made ──> not allocated ──launch──> allocated ──free node, cuMemFree(Async), automatic free──> not allocated
//! ```
//!
//! The physical memory stays until graph and executable graph are gone and the memory is not allocated.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rekindle_cuda_abi::types::*;

use crate::Result;

/// Memory of an allocation node.
#[derive(Clone, Copy, Debug)]
struct Allocation {
    bytes: usize,
    device: CUdevice,
    /// Graphs and executable graphs that have the node.
    users: usize,
    /// Whether the memory is allocated.
    live: bool,
}

/// All memory of graphs.
#[derive(Debug, Default)]
pub(crate) struct GraphMemory {
    allocations: HashMap<CUdeviceptr, Allocation>,
    /// The most bytes of each device that were allocated at a time, and the most bytes that had an address.
    highest: HashMap<CUdevice, (u64, u64)>,
    /// Memory that nothing uses any more. The driver is to take it back.
    released: Vec<CUdeviceptr>,
}

/// The number of allocation nodes' memories, for [`any`].
static ANY: AtomicUsize = AtomicUsize::new(0);

/// Whether there is any memory of graphs.
#[inline]
pub(crate) fn any() -> bool {
    ANY.load(Relaxed) != 0
}

impl GraphMemory {
    /// Updates the count that [`any`] reads.
    pub(crate) fn publish(&self) {
        ANY.store(self.allocations.len(), Relaxed);
    }

    /// An allocation node is made for this memory.
    pub(crate) fn add(&mut self, address: CUdeviceptr, bytes: usize, device: CUdevice) {
        self.allocations.insert(address, Allocation { bytes, device, users: 1, live: false });
        self.note_high();
    }

    /// Whether there is no memory of graphs.
    pub(crate) fn is_empty(&self) -> bool {
        self.allocations.is_empty()
    }

    /// Whether an address is the address of a graph's memory.
    pub(crate) fn contains(&self, address: CUdeviceptr) -> bool {
        self.allocations.contains_key(&address)
    }

    /// Takes out the memory that the driver is to take back.
    pub(crate) fn take_released(&mut self) -> Vec<CUdeviceptr> {
        std::mem::take(&mut self.released)
    }

    /// Allocated bytes, and all bytes, of a device.
    pub(crate) fn sums(&self, device: CUdevice) -> (u64, u64) {
        let mine = || self.allocations.values().filter(|m| m.device == device);
        let bytes = |m: &Allocation| m.bytes as u64;
        (mine().filter(|m| m.live).map(bytes).sum(), mine().map(bytes).sum())
    }

    fn note_high(&mut self) {
        let devices: Vec<CUdevice> = self.allocations.values().map(|m| m.device).collect();
        for device in devices {
            let (used, reserved) = self.sums(device);
            let high = self.highest.entry(device).or_default();
            *high = (high.0.max(used), high.1.max(reserved));
        }
    }

    /// The most bytes of a device that were allocated at a time, and the most bytes that had an address.
    pub(crate) fn high(&self, device: CUdevice) -> (u64, u64) {
        self.highest.get(&device).copied().unwrap_or_default()
    }

    /// Resets one of the two maxima to the present amount.
    pub(crate) fn reset_high(&mut self, device: CUdevice, used: bool) {
        let now = self.sums(device);
        let high = self.highest.entry(device).or_default();
        *high = if used { (now.0, high.1) } else { (high.0, now.1) };
    }

    /// Records that another graph or executable graph has the node.
    pub(crate) fn retain(&mut self, address: CUdeviceptr) {
        if let Some(memory) = self.allocations.get_mut(&address) {
            memory.users += 1;
        }
    }

    /// Records that one graph or executable graph fewer has the node.
    pub(crate) fn release(&mut self, address: CUdeviceptr) {
        if let Some(memory) = self.allocations.get_mut(&address) {
            memory.users = memory.users.saturating_sub(1);
        }
        self.drop_unused(address);
    }

    fn set_live(&mut self, address: &CUdeviceptr, live: bool) {
        if let Some(memory) = self.allocations.get_mut(address) {
            memory.live = live;
        }
    }

    /// Releases memory that no graph has and that is not allocated.
    pub(crate) fn drop_unused(&mut self, address: CUdeviceptr) {
        if self.allocations.get(&address).is_some_and(|m| m.users == 0 && !m.live) {
            self.allocations.remove(&address);
            self.released.push(address);
        }
    }

    /// The application frees an address: `None` where the address belongs to no graph.
    pub(crate) fn free(&mut self, address: CUdeviceptr) -> Option<Result<()>> {
        let memory = self.allocations.get_mut(&address)?;
        if !memory.live {
            return Some(Err(CUDA_ERROR_INVALID_VALUE));
        }
        memory.live = false;
        self.drop_unused(address);
        Some(Ok(()))
    }

    /// An executable graph that allocates and frees these is about to be launched. After the launch, the caller calls
    /// [`GraphMemory::drop_unused`] for each address that the graph frees.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where memory is allocated that must not be, or memory is not allocated that must be. Nothing
    /// changes then.
    pub(crate) fn launch(&mut self, allocates: &[CUdeviceptr], frees: &[CUdeviceptr], automatic: bool) -> Result<()> {
        let live = |address: &CUdeviceptr| self.allocations.get(address).is_some_and(|m| m.live);
        if !automatic && allocates.iter().any(live) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if frees.iter().any(|address| !allocates.contains(address) && !live(address)) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // Memory that is freed was allocated for a moment.
        allocates.iter().for_each(|address| self.set_live(address, true));
        self.note_high();
        frees.iter().for_each(|address| self.set_live(address, false));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_stays_as_long_as_a_graph_or_the_program_has_it() {
        let mut memory = GraphMemory::default();
        memory.add(64, 8, 0);
        assert_eq!(memory.free(64), Some(Err(CUDA_ERROR_INVALID_VALUE)));
        assert_eq!(memory.free(65), None);
        memory.launch(&[64], &[], false).unwrap();
        assert_eq!(memory.launch(&[64], &[], false), Err(CUDA_ERROR_INVALID_VALUE));
        memory.launch(&[64], &[], true).unwrap();
        memory.release(64);
        assert!(memory.released.is_empty());
        assert_eq!(memory.free(64), Some(Ok(())));
        assert_eq!(memory.released, [64]);
    }

    #[test]
    fn a_graph_that_frees_what_it_allocates_can_be_launched_again_and_again() {
        let mut memory = GraphMemory::default();
        memory.add(64, 8, 0);
        for _ in 0..3 {
            memory.launch(&[64], &[64], false).unwrap();
        }
        assert_eq!(memory.launch(&[], &[64], false), Err(CUDA_ERROR_INVALID_VALUE));
    }
}

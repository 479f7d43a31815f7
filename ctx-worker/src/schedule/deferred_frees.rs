//! Deferred frees of memory from pools: an allocation that comes after one in its stream takes its memory over.

use rekindle_wire::codec::Reader;
use rekindle_wire::command::{self, PoolFree};

use crate::resources::memory::Allocation;
use crate::resources::pools::rounded;
use crate::schedule::deferred::{Entry, Progress};
use crate::schedule::dependencies::Uses;
use crate::serve::executor::Executor;
use crate::session::waiting::PoolAllocation;

impl Executor {
    /// Frees of memory from pools that are held, by their numbers.
    fn held_frees(&self) -> impl Iterator<Item = (&Entry, u64, Allocation)> {
        let frees = self.scheduler.deferred.list.iter().filter(|e| e.header.call == command::POOL_FREE);
        frees.filter_map(|entry| {
            let PoolFree { address, .. } = PoolFree::read(&mut Reader::new(&entry.parameters)).ok()?;
            let (_, allocation) = self.memory.find_allocation(address)?;
            (allocation.pool != 0).then_some((entry, address, allocation))
        })
    }

    /// Takes an allocation over whose free in the same stream is held: what the stream does from here on comes after it.
    /// It is the smallest of those of `length` to `most` bytes, and stays whole, since what is held before its free may
    /// use all of it; the free is taken out, since its memory is in use again.
    pub(crate) fn take_over_held(
        &mut self,
        wanted: &PoolAllocation,
        length: u64,
        most: u64,
    ) -> Option<(u64, Allocation)> {
        let fits = |(entry, address, allocation): (&Entry, u64, Allocation)| {
            let found = rounded(allocation.size).filter(|found| (length..=most).contains(found))?;
            let in_stream = entry.uses.lane.is_some_and(|lane| lane.key == wanted.key);
            (in_stream && allocation.pool == wanted.pool).then_some((found, entry.id, address, allocation))
        };
        let (_, id, address, allocation) = self.held_frees().filter_map(fits).min_by_key(|found| found.0)?;
        self.scheduler.deferred.take_out(id);
        Some((address, allocation))
    }

    /// Defers the allocation under way where a deferred free gives memory of its device back. Whether it is deferred: then
    /// it is tried again whenever a deferred command has gone.
    pub(crate) fn defer_pool_alloc(&mut self, device: usize, parameters: &[u8]) -> bool {
        if !self.held_frees().any(|(_, _, allocation)| self.memory.pools.device(allocation.pool) == Some(device)) {
            return false;
        }
        let uses = Uses { context: self.header.context, ..Default::default() };
        self.scheduler.deferred.add(self.header, parameters.to_vec(), uses, Progress::Queued);
        true
    }
}

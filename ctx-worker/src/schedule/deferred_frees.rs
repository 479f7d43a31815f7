//! Deferred frees of memory from pools: an allocation that follows a deferred free in its stream takes over its memory.

use rekindle_wire::codec::Reader;
use rekindle_wire::command::{self, PoolFree};
use rekindle_wire::ring::CommandHeader;

use crate::resources::Memory;
use crate::resources::memory::Allocation;
use crate::resources::pool_commands::DeferredFrees;
use crate::resources::pools::rounded;
use crate::schedule::deferred::{DeferredCommands, Entry, Progress};
use crate::schedule::dependencies::Dependencies;
use crate::session::waiting::PoolAllocation;

/// Deferred frees of memory from pools, with the addresses that they free.
fn frees<'a>(deferred: &'a DeferredCommands, memory: &Memory) -> impl Iterator<Item = (&'a Entry, u64, Allocation)> {
    let frees = deferred.list.iter().filter(|e| e.header.call == command::POOL_FREE);
    frees.filter_map(|entry| {
        let PoolFree { address, .. } = PoolFree::read(&mut Reader::new(&entry.parameters)).ok()?;
        let (_, allocation) = memory.find_allocation(address)?;
        (allocation.pool != 0).then_some((entry, address, allocation))
    })
}

impl DeferredFrees for DeferredCommands {
    fn take_over(
        &mut self,
        memory: &Memory,
        wanted: &PoolAllocation,
        length: u64,
        most: u64,
    ) -> Option<(u64, Allocation)> {
        let fits = |(entry, address, allocation): (&Entry, u64, Allocation)| {
            let found = rounded(allocation.size).filter(|found| (length..=most).contains(found))?;
            let in_stream = entry.dependencies.lane.is_some_and(|lane| lane.key == wanted.key);
            (in_stream && allocation.pool == wanted.pool).then_some((found, entry.id, address, allocation))
        };
        let (_, id, address, allocation) = frees(self, memory).filter_map(fits).min_by_key(|found| found.0)?;
        self.take_out(id);
        Some((address, allocation))
    }

    fn defer_allocation(&mut self, memory: &Memory, device: usize, header: CommandHeader, parameters: &[u8]) -> bool {
        if !frees(self, memory).any(|(_, _, allocation)| memory.pools.device(allocation.pool) == Some(device)) {
            return false;
        }
        let dependencies = Dependencies { context: header.context, ..Default::default() };
        self.add(header, parameters.to_vec(), dependencies, Progress::Queued, None);
        true
    }
}

//! Pools of stream-ordered allocation: the free parts of a pool's memory, and the events behind which parts become free.
//!
//! ```text
//!   segment (mapped, 32 MiB or a multiple) ── used | free | pending: freed in a stream that may not be there yet
//! ```
//!
//! A pending part is free at once for the stream that freed it, since that stream's next commands come after the free. For
//! other streams the part is free once the event behind the free has happened. Nobody waits for that event: the worker
//! queries it when memory is wanted, and when the client has waited for something. On the latter occasion the worker also
//! gives back unused segments above a pool's threshold.
//!
//! A pool that other processes know by a name keeps the segments of which it has given names away until the pool has been
//! destroyed, as the driver's pools for other processes do: the others have these segments mapped.
//!
//! A deferred free (see [`crate::schedule::deferred`]) leaves its memory in use. An allocation in the same stream may take
//! that memory over at once (see [`crate::resources::pool_commands`]).

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Malformed;
use rekindle_wire::command::default_pool;
use rekindle_wire::free_ranges::FreeRanges;
use rekindle_wire::ipc::Token;

use crate::gpu::driver::Driver;
use crate::resources::memory::ALIGN;
use crate::session::state::{self, State};
use crate::session::waiting::StreamKey;

/// The step by which a pool's memory grows, the same as the driver's.
pub(crate) const SEGMENT: u64 = 32 << 20;

/// An event behind a free.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fence {
    /// The client's context in which the event is.
    pub(crate) context: u64,
    pub(crate) event: CUevent,
}

/// A part that is free once the device has passed its fence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    address: u64,
    length: u64,
    pub(crate) stream: StreamKey,
    pub(crate) fence: Fence,
}

/// A pool.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// The worker's number of the device that the memory is on.
    pub(crate) device: usize,
    /// The attributes 1 to 4: three ways of reuse, and the release threshold.
    settings: [u64; 4],
    /// The most bytes that the pool may take; 0 for no limit.
    maximum: u64,
    /// Other devices that may use the pool's memory.
    pub(crate) access: BTreeSet<usize>,
    /// The pool has been destroyed, and goes away when the last of its memory is freed.
    pub(crate) dying: bool,
    /// The name by which other processes may know the pool.
    pub(crate) name: Option<Token>,
    segments: BTreeMap<u64, u64>,
    /// The names by which other processes may know segments.
    names: BTreeMap<u64, Token>,
    free: FreeRanges,
    pending: VecDeque<Pending>,
    used: u64,
    used_high: u64,
    reserved_high: u64,
}

const FOLLOW_DEPENDENCIES: u32 = 1;
const OPPORTUNISTIC: u32 = 2;
const INTERNAL_DEPENDENCIES: u32 = 3;
const RELEASE_THRESHOLD: u32 = 4;

/// The bytes that an allocation of this size takes in a pool; `None` for a size that no memory has.
pub(crate) fn rounded(size: u64) -> Option<u64> {
    size.checked_next_multiple_of(ALIGN).filter(|s| *s < 1 << 48)
}

impl Pool {
    pub(crate) fn new(device: usize, maximum: u64) -> Self {
        Self { device, maximum, settings: [1, 1, 1, 0], ..Self::default() }
    }

    /// `CU_MEMPOOL_ATTR_*`.
    pub(crate) fn attribute(&self, attribute: u32) -> Result<u64, CUresult> {
        Ok(match attribute {
            FOLLOW_DEPENDENCIES..=RELEASE_THRESHOLD => self.settings[attribute as usize - 1],
            5 => self.reserved(),
            6 => self.reserved_high,
            7 => self.used,
            8 => self.used_high,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        })
    }

    /// Sets an attribute. High-water marks can only be set to 0, and start again from the present amount.
    pub(crate) fn set_attribute(&mut self, attribute: u32, value: u64) -> Result<(), CUresult> {
        match attribute {
            FOLLOW_DEPENDENCIES..=RELEASE_THRESHOLD => self.settings[attribute as usize - 1] = value,
            6 if value == 0 => self.reserved_high = self.reserved(),
            8 if value == 0 => self.used_high = self.used,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        Ok(())
    }

    pub(crate) fn allows_internal_dependencies(&self) -> bool {
        self.settings[INTERNAL_DEPENDENCIES as usize - 1] != 0
    }

    fn is_opportunistic(&self) -> bool {
        self.settings[OPPORTUNISTIC as usize - 1] != 0
    }

    fn threshold(&self) -> u64 {
        self.settings[RELEASE_THRESHOLD as usize - 1]
    }

    /// The number of bytes mapped for the pool.
    pub(crate) fn reserved(&self) -> u64 {
        self.segments.values().sum()
    }

    /// Whether the pool may grow by this much.
    pub(crate) fn may_grow(&self, length: u64) -> bool {
        self.maximum == 0 || self.reserved().saturating_add(length) <= self.maximum
    }

    /// Whether no part of the pool is in use, so that a destroyed pool can go away.
    pub(crate) fn is_unused(&self) -> bool {
        self.used == 0 && self.pending.is_empty()
    }

    /// Adds a mapped segment, all of it free.
    pub(crate) fn grow(&mut self, address: u64, length: u64) {
        self.segments.insert(address, length);
        self.free_within(address, length);
        self.reserved_high = self.reserved_high.max(self.reserved());
    }

    /// Takes `length` bytes that a stream may use from here on: the smallest part that is large enough.
    pub(crate) fn take(&mut self, length: u64, stream: StreamKey) -> Option<u64> {
        let free = self.free.best_fit(length);
        let own = self.pending.iter().enumerate().filter(|(_, p)| p.stream == stream && p.length >= length);
        let own = own.min_by_key(|(_, p)| p.length).map(|(i, p)| (i, p.length));
        match (own, free) {
            (Some((i, pending)), free) if free.is_none_or(|(_, l)| pending <= l) => self.take_pending(i, length),
            (_, Some((address, _))) => {
                self.free.take_at(address, length);
                self.count(length);
                Some(address)
            }
            _ => None,
        }
    }

    /// Takes the front of a pending part. The rest keeps its fence. The caller may give a fence back only when the part is
    /// gone, so an empty part stays until its fence has passed.
    fn take_pending(&mut self, i: usize, length: u64) -> Option<u64> {
        let part = self.pending.get_mut(i)?;
        let address = part.address;
        part.address += length;
        part.length -= length;
        self.count(length);
        Some(address)
    }

    /// Takes a part that another stream has freed and that is large enough, with the fence to wait for.
    pub(crate) fn take_behind_fence(&mut self, length: u64) -> Option<(u64, Fence)> {
        let fits = self.pending.iter().enumerate().filter(|(_, p)| p.length >= length);
        let (i, fence) = fits.min_by_key(|(_, p)| p.length).map(|(i, p)| (i, p.fence))?;
        Some((self.take_pending(i, length)?, fence))
    }

    fn count(&mut self, length: u64) {
        self.used += length;
        self.used_high = self.used_high.max(self.used);
    }

    /// Takes a particular part, which must be free; for a restore.
    pub(crate) fn take_at(&mut self, address: u64, length: u64) -> bool {
        let taken = self.free.take_at(address, length);
        if taken {
            self.used += length;
        }
        taken
    }

    /// Frees a part that nothing uses any more.
    pub(crate) fn give(&mut self, address: u64, length: u64) {
        self.used = self.used.saturating_sub(length);
        self.free_within(address, length);
    }

    /// Frees a part that nothing uses once the stream has passed the fence.
    pub(crate) fn give_behind(&mut self, address: u64, length: u64, stream: StreamKey, fence: Fence) {
        self.used = self.used.saturating_sub(length);
        self.pending.push_back(Pending { address, length, stream, fence });
    }

    /// Marks a part as free, and joins it with its free neighbours in the same segment.
    fn free_within(&mut self, address: u64, length: u64) {
        if let Some((&base, &size)) = self.segments.range(..=address).next_back() {
            self.free.give_within(address, length, base..base.saturating_add(size));
        }
    }

    /// Parts become free for whose fences `passed` returns true. In each stream, `passed` is not called for the parts
    /// behind the first whose fence has not passed. Returns the fences that are no longer needed.
    fn settle(&mut self, mut passed: impl FnMut(Fence) -> bool) -> Vec<Fence> {
        let mut blocked: Vec<StreamKey> = Vec::new();
        let mut done = Vec::new();
        for part in std::mem::take(&mut self.pending) {
            if blocked.contains(&part.stream) {
                self.pending.push_back(part);
            } else if passed(part.fence) {
                done.push(part.fence);
                self.free_within(part.address, part.length);
            } else {
                blocked.push(part.stream);
                self.pending.push_back(part);
            }
        }
        done
    }

    /// The name of the segment that an address is in, and where the address is in it. A segment without a name gets `new`.
    pub(crate) fn name_segment(&mut self, address: u64, new: impl FnOnce() -> Option<Token>) -> Option<(Token, u64)> {
        let (&base, length) = self.segments.range(..=address).next_back()?;
        let offset = address - base;
        if offset >= *length {
            return None;
        }
        let name = match self.names.get(&base) {
            Some(name) => *name,
            None => *self.names.entry(base).or_insert(new()?),
        };
        Some((name, offset))
    }

    /// Removes segments that nothing uses, the last ones first, as long as `keep` bytes remain.
    pub(crate) fn shrink(&mut self, keep: u64) -> Vec<u64> {
        let free: HashSet<(u64, u64)> = self.free.parts().collect();
        let all = self.segments.iter().map(|(address, length)| (*address, *length));
        let may_go = |address: &u64| self.dying || !self.names.contains_key(address);
        let unused: Vec<(u64, u64)> = all.filter(|it| free.contains(it) && may_go(&it.0)).collect();
        let mut gone = Vec::new();
        for (address, length) in unused.into_iter().rev() {
            if self.reserved() - length < keep {
                continue;
            }
            self.segments.remove(&address);
            self.names.remove(&address);
            self.free.take_at(address, length);
            gone.push(address);
        }
        gone
    }

    /// The addresses at which the pool's segments begin.
    pub(crate) fn segment_addresses(&self) -> impl Iterator<Item = u64> {
        self.segments.keys().copied()
    }

    /// The streams in which frees are under way.
    pub(crate) fn pending_streams(&self) -> impl Iterator<Item = StreamKey> {
        self.pending.iter().map(|p| p.stream)
    }
}

/// All pools of a client.
pub(crate) struct Pools {
    pub(crate) by_handle: BTreeMap<u64, Pool>,
    /// The pool that each device's allocations come from.
    current: Vec<u64>,
    spare: HashMap<u64, Vec<CUevent>>,
}

impl Pools {
    /// The default pools of this many devices.
    pub(crate) fn new(devices: usize) -> Self {
        Self {
            by_handle: (0..devices).map(|d| (default_pool(d), Pool::new(d, 0))).collect(),
            current: (0..devices).map(default_pool).collect(),
            spare: HashMap::new(),
        }
    }

    /// The pool that the client's handle names.
    pub(crate) fn get(&mut self, handle: u64) -> Result<&mut Pool, CUresult> {
        self.by_handle.get_mut(&handle).filter(|p| !p.dying).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// The device of a pool, destroyed or not.
    pub(crate) fn device(&self, handle: u64) -> Option<usize> {
        self.by_handle.get(&handle).map(|pool| pool.device)
    }

    /// The device of the pool that has this name.
    pub(crate) fn named(&self, name: &Token) -> Option<usize> {
        self.by_handle.values().find(|pool| !pool.dying && pool.name.as_ref() == Some(name)).map(|pool| pool.device)
    }

    /// The device and the address of the segment that has this name.
    pub(crate) fn segment_named(&self, name: &Token) -> Option<(usize, u64)> {
        self.by_handle.values().find_map(|pool| {
            let (address, _) = pool.names.iter().find(|(_, its)| *its == name)?;
            Some((pool.device, *address))
        })
    }

    /// Whether other processes may know any pool.
    pub(crate) fn have_names(&self) -> bool {
        self.by_handle.values().any(|pool| pool.name.is_some() || !pool.names.is_empty())
    }

    pub(crate) fn current(&self, device: usize) -> u64 {
        self.current.get(device).copied().unwrap_or(0)
    }

    pub(crate) fn set_current(&mut self, device: usize, handle: u64) -> Result<(), CUresult> {
        // Memory of another device would not do for allocations on this one.
        if self.get(handle)?.device != device {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if let Some(current) = self.current.get_mut(device) {
            *current = handle;
        }
        Ok(())
    }

    /// An event to record in the current context, which is the client's `context`.
    pub(crate) fn fence(&mut self, driver: &Driver, context: u64) -> Result<Fence, CUresult> {
        if let Some(event) = self.spare.get_mut(&context).and_then(Vec::pop) {
            return Ok(Fence { context, event });
        }
        const DISABLE_TIMING: u32 = 2;
        let mut event = 0;
        // SAFETY: the out parameter is a local.
        match unsafe { (driver.cuEventCreate)(&raw mut event, DISABLE_TIMING) } {
            CUDA_SUCCESS => Ok(Fence { context, event }),
            error => Err(error),
        }
    }

    /// Queries which frees have happened.
    pub(crate) fn settle(&mut self, driver: &Driver) {
        for pool in self.by_handle.values_mut() {
            // SAFETY: the event is ours; a query has no other effect. After an error nothing runs any more.
            let passed = |f: Fence| unsafe { (driver.cuEventQuery)(f.event) } != CUDA_ERROR_NOT_READY;
            for fence in pool.settle(passed) {
                self.spare.entry(fence.context).or_default().push(fence.event);
            }
        }
    }

    /// Does the same as [`Pools::settle`], for an allocation from a pool that may ask.
    pub(crate) fn settle_for(&mut self, driver: &Driver, handle: u64) {
        if self.by_handle.get(&handle).is_some_and(|p| p.is_opportunistic() && !p.pending.is_empty()) {
            self.settle(driver);
        }
    }

    /// Forgets a context that is about to go away, in which nothing runs any more, with its events.
    pub(crate) fn forget_context(&mut self, context: u64) {
        for pool in self.by_handle.values_mut() {
            for part in std::mem::take(&mut pool.pending) {
                if part.fence.context == context {
                    pool.free_within(part.address, part.length);
                } else {
                    pool.pending.push_back(part);
                }
            }
        }
        self.spare.remove(&context);
    }

    /// The segments that pools need not keep, once the client has waited for something, each with its pool's device.
    pub(crate) fn surplus(&mut self) -> Vec<(usize, u64)> {
        let mut surplus = Vec::new();
        for pool in self.by_handle.values_mut() {
            let keep = if pool.dying { 0 } else { pool.threshold() };
            if pool.reserved() > keep {
                surplus.extend(pool.shrink(keep).into_iter().map(|address| (pool.device, address)));
            }
        }
        self.by_handle.retain(|_, pool| !(pool.dying && pool.is_unused()));
        surplus
    }

    /// Whether any pool holds memory.
    pub(crate) fn hold_memory(&self) -> bool {
        self.by_handle.values().any(|p| !p.segments.is_empty())
    }

    /// Ends all pools of a device whose context is reset; the default pool begins anew. Returns their segments.
    pub(crate) fn reset(&mut self, device: usize) -> Vec<u64> {
        let segments =
            self.by_handle.values().filter(|p| p.device == device).flat_map(|p| p.segments.keys().copied()).collect();
        self.by_handle.retain(|_, p| p.device != device);
        self.by_handle.insert(default_pool(device), Pool::new(device, 0));
        if let Some(current) = self.current.get_mut(device) {
            *current = default_pool(device);
        }
        segments
    }

    /// Writes the pools for the image. The free parts are left out, since they follow from the allocations. No part is
    /// pending, since every stream is idle.
    pub(crate) fn write(&self, state: &mut State) {
        let bytes = |name: Option<&Token>| name.map_or_else(Vec::new, |name| name.to_vec());
        let segment = |pool: &Pool, address: u64, size: u64| state::Segment {
            address,
            size,
            name: bytes(pool.names.get(&address)),
            ..Default::default()
        };
        let pool = |(&handle, pool): (&u64, &Pool)| state::Pool {
            handle,
            device: pool.device as u32,
            maximum: pool.maximum,
            dying: pool.dying,
            access: pool.access.iter().map(|device| *device as u32).collect(),
            settings: pool.settings.to_vec(),
            used_high: pool.used_high,
            reserved_high: pool.reserved_high,
            segments: pool.segments.iter().map(|(address, size)| segment(pool, *address, *size)).collect(),
            name: bytes(pool.name.as_ref()),
            ..state::Pool::default()
        };
        state.pools = self.by_handle.iter().map(pool).collect();
        state.current_pools.clone_from(&self.current);
    }

    /// Reads what [`Pools::write`] wrote.
    pub(crate) fn read(&mut self, state: &State, devices: usize) -> Result<(), Malformed> {
        let name = |bytes: &[u8]| (!bytes.is_empty()).then(|| state::name(bytes)).transpose();
        self.by_handle.clear();
        for saved in &state.pools {
            let device = saved.device as usize;
            if device >= devices {
                return Err(Malformed("a pool of a device that is not here"));
            }
            let mut pool = Pool::new(device, saved.maximum);
            pool.dying = saved.dying;
            pool.access = saved.access.iter().map(|d| *d as usize).filter(|d| *d < devices).collect();
            pool.settings.iter_mut().zip(&saved.settings).for_each(|(setting, saved)| *setting = *saved);
            for segment in &saved.segments {
                pool.grow(segment.address, segment.size);
                pool.names.extend(name(&segment.name)?.map(|name| (segment.address, name)));
            }
            pool.name = name(&saved.name)?;
            (pool.used_high, pool.reserved_high) = (saved.used_high, saved.reserved_high);
            self.by_handle.insert(saved.handle, pool);
        }
        self.current.iter_mut().zip(&state.current_pools).for_each(|(current, saved)| *current = *saved);
        Ok(())
    }

    /// The segments of an image's pools: device, address, length, and the other devices that may use each.
    pub(crate) fn segments(&self) -> Vec<(usize, u64, u64, Vec<usize>)> {
        let all = self.by_handle.values();
        all.flat_map(|p| p.segments.iter().map(|(a, l)| (p.device, *a, *l, p.access.iter().copied().collect())))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: StreamKey = StreamKey { context: 1, handle: 2, thread: 0 };
    const B: StreamKey = StreamKey { context: 1, handle: 3, thread: 0 };
    const FENCE: Fence = Fence { context: 1, event: 9 };

    fn pool() -> Pool {
        let mut pool = Pool::new(0, 0);
        pool.grow(SEGMENT, SEGMENT);
        pool
    }

    #[test]
    fn what_a_stream_freed_is_its_own_at_once_and_of_others_after_the_fence() {
        let mut pool = pool();
        let all = pool.take(SEGMENT, A).unwrap();
        pool.give_behind(all, SEGMENT, A, FENCE);
        assert_eq!(pool.take(512, B), None);
        assert_eq!(pool.take(512, A), Some(all));
        assert_eq!(pool.attribute(7), Ok(512));
        assert!(pool.settle(|_| false).is_empty());
        assert_eq!(pool.take(512, B), None);
        assert_eq!(pool.settle(|_| true).len(), 1);
        assert_eq!(pool.take(512, B), Some(all + 512));
    }

    #[test]
    fn a_free_behind_one_that_has_not_happened_is_not_asked_about() {
        let mut pool = pool();
        let parts: Vec<u64> = (0..3).filter_map(|_| pool.take(512, A)).collect();
        pool.give_behind(parts[0], 512, A, FENCE);
        pool.give_behind(parts[1], 512, A, FENCE);
        pool.give_behind(parts[2], 512, B, FENCE);
        let mut asked = 0;
        pool.settle(|_| {
            asked += 1;
            false
        });
        assert_eq!(asked, 2);
    }

    #[test]
    fn segments_go_when_all_of_them_is_free_and_enough_remains() {
        let mut pool = pool();
        pool.grow(2 * SEGMENT, SEGMENT);
        let part = pool.take(1024, A).unwrap();
        assert_eq!(pool.shrink(0), [2 * SEGMENT]);
        pool.give(part, 1024);
        assert!(pool.shrink(1).is_empty());
        assert_eq!(pool.shrink(0), [SEGMENT]);
        assert_eq!((pool.reserved(), pool.attribute(6)), (0, Ok(2 * SEGMENT)));
    }

    #[test]
    fn segments_with_names_stay_until_their_pool_is_destroyed() {
        let mut pool = pool();
        pool.grow(2 * SEGMENT, SEGMENT);
        assert_eq!(pool.name_segment(SEGMENT + 512, || Some([5; 16])), Some(([5; 16], 512)));
        assert_eq!(pool.name_segment(SEGMENT, || None), Some(([5; 16], 0)));
        assert_eq!(pool.name_segment(3 * SEGMENT, || Some([6; 16])), None);
        assert_eq!(pool.shrink(0), [2 * SEGMENT]);
        pool.dying = true;
        assert_eq!(pool.shrink(0), [SEGMENT]);
        assert!(pool.names.is_empty());
    }

    #[test]
    fn pools_are_read_as_they_were_written() {
        let mut pools = Pools::new(2);
        let pool = pools.get(default_pool(1)).unwrap();
        pool.grow(SEGMENT, SEGMENT);
        pool.set_attribute(4, u64::MAX).unwrap();
        pool.access.insert(0);
        let part = pool.take(512, A).unwrap();
        pool.name = Some([7; 16]);
        pool.name_segment(part, || Some([8; 16])).unwrap();
        let mut state = State::default();
        pools.write(&mut state);
        assert!(Pools::new(1).read(&state, 1).is_err());
        let mut read = Pools::new(2);
        read.read(&state, 2).unwrap();
        assert_eq!(read.segments(), [(1, SEGMENT, SEGMENT, vec![0])]);
        assert_eq!((read.named(&[7; 16]), read.named(&[8; 16])), (Some(1), None));
        assert_eq!(read.segment_named(&[8; 16]), Some((1, SEGMENT)));
        let pool = read.get(default_pool(1)).unwrap();
        assert!(pool.take_at(part, 512));
        assert!(!pool.take_at(part, 512));
        assert_eq!((pool.attribute(4), pool.attribute(7), pool.attribute(8)), (Ok(u64::MAX), Ok(512), Ok(512)));
    }
}

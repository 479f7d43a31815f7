//! Stream-ordered allocation on the worker's side: the commands, and the pools of a restore.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{
    self, Kind, PoolAlloc, PoolCreate, PoolCurrent, PoolDestroy, PoolExport, PoolFree, PoolGet, PoolGetAccess,
    PoolMemoryExport, PoolSet, PoolSetAccess, PoolSetCurrent, PoolTrim, WINDOW_FULL, default_pool,
};
use rekindle_wire::ring::CommandHeader;

use crate::gpu::driver::Driver;
use crate::resources::Memory;
use crate::resources::ipc::names::{new_name, write_name};
use crate::resources::memory::{Allocation, MemoryError};
use crate::resources::not_loaded::NotLoaded;
use crate::resources::pools::{Pool, SEGMENT, rounded};
use crate::session::call::Call;
use crate::session::outcome::{Outcome, Refused};
use crate::session::waiting::{PoolAllocation, StreamKey, Then};

/// Deferred frees: the client has asked for them, and their memory is in use until they are executed.
pub(crate) trait DeferredFrees {
    /// Takes over an allocation whose free in the same stream is deferred: the stream's next commands come after that free.
    /// The allocation is the smallest of those of `length` to `most` bytes. It stays whole, since commands that are
    /// deferred before its free may use all of it. The free is removed, since the memory is in use again.
    fn take_over(
        &mut self,
        memory: &Memory,
        wanted: &PoolAllocation,
        length: u64,
        most: u64,
    ) -> Option<(u64, Allocation)>;

    /// Defers an allocation where a deferred free gives memory of its device back. Returns whether the allocation is
    /// deferred; if so, it is tried again whenever a deferred command has been executed.
    fn defer_allocation(&mut self, memory: &Memory, device: usize, header: CommandHeader, parameters: &[u8]) -> bool;
}

impl Memory {
    /// Executes a command about pools.
    pub(crate) fn pool_command(
        &mut self,
        call: &mut Call,
        frees: &mut impl DeferredFrees,
        number: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        match number {
            command::POOL_ALLOC => return self.pool_alloc(call, frees, args, reply),
            command::POOL_FREE => return self.pool_free(call, args),
            command::POOL_CREATE => self.pool_create(args)?,
            command::POOL_DESTROY => self.pool_destroy(call.driver(), args)?,
            command::POOL_TRIM => self.pool_trim(call.driver(), args)?,
            command::POOL_GET => {
                let PoolGet { pool, attribute } = PoolGet::read(args)?;
                reply.word(self.pools.get(pool).and_then(|p| p.attribute(attribute)).map_err(Refused::Code)?);
            }
            command::POOL_SET => {
                let PoolSet { pool, attribute, value } = PoolSet::read(args)?;
                let set = self.pools.get(pool).and_then(|p| p.set_attribute(attribute, value));
                set.map_err(Refused::Code)?;
            }
            command::POOL_SET_ACCESS => self.pool_set_access(call.driver(), args)?,
            command::POOL_GET_ACCESS => {
                let PoolGetAccess { pool, device } = PoolGetAccess::read(args)?;
                self.device(device)?;
                let pool = self.pools.get(pool).map_err(Refused::Code)?;
                let open = pool.device as u64 == device || pool.access.contains(&(device as usize));
                reply.word(if open { u64::from(CU_MEM_ACCESS_READWRITE) } else { 0 });
            }
            command::POOL_CURRENT => {
                let PoolCurrent { device } = PoolCurrent::read(args)?;
                self.device(device)?;
                reply.word(self.pools.current(device as usize));
            }
            command::POOL_SET_CURRENT => {
                let PoolSetCurrent { device, pool } = PoolSetCurrent::read(args)?;
                self.device(device)?;
                self.pools.set_current(device as usize, pool).map_err(Refused::Code)?;
            }
            command::POOL_EXPORT => {
                let PoolExport { pool } = PoolExport::read(args)?;
                let pool = self.pools.get(pool).map_err(Refused::Code)?;
                let name = pool.name.or_else(new_name).ok_or(Refused::Code(CUDA_ERROR_OPERATING_SYSTEM))?;
                pool.name = Some(name);
                write_name(reply, &name);
            }
            command::POOL_MEMORY_EXPORT => {
                let PoolMemoryExport { address } = PoolMemoryExport::read(args)?;
                let invalid = Refused::Code(CUDA_ERROR_INVALID_VALUE);
                let Some((_, allocation)) = self.find_allocation(address) else { return Err(invalid) };
                let Some(pool) = self.pools.by_handle.get_mut(&allocation.pool) else { return Err(invalid) };
                let name = pool.name.or_else(new_name).ok_or(Refused::Code(CUDA_ERROR_OPERATING_SYSTEM))?;
                pool.name = Some(name);
                let (segment, offset) = pool.name_segment(address, new_name).ok_or(invalid)?;
                write_name(reply, &segment);
                write_name(reply, &name);
                reply.word(offset);
                reply.word(allocation.size);
            }
            _ => return Err(Refused::UnknownCall(number)),
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn pool_create(&mut self, args: &mut Reader<'_>) -> Result<(), Refused> {
        let PoolCreate { pool: handle, device, maximum } = PoolCreate::read(args)?;
        self.device(device)?;
        if !Kind::MemPool.owns(handle) || self.pools.by_handle.contains_key(&handle) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        self.pools.by_handle.insert(handle, Pool::new(device as usize, maximum));
        Ok(())
    }

    fn pool_destroy(&mut self, driver: &Driver, args: &mut Reader<'_>) -> Result<(), Refused> {
        let PoolDestroy { pool: handle } = PoolDestroy::read(args)?;
        let pool = self.pools.get(handle).map_err(Refused::Code)?;
        let device = pool.device;
        if handle == default_pool(device) {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        }
        pool.dying = true;
        if self.pools.current(device) == handle {
            self.pools.set_current(device, default_pool(device)).map_err(Refused::Code)?;
        }
        self.pools.settle(driver);
        let surplus = self.pools.surplus();
        self.unmap_segments(driver, surplus);
        Ok(())
    }

    fn pool_trim(&mut self, driver: &Driver, args: &mut Reader<'_>) -> Result<(), Refused> {
        let PoolTrim { pool: handle, keep } = PoolTrim::read(args)?;
        self.pools.get(handle).map_err(Refused::Code)?;
        self.pools.settle(driver);
        let pool = self.pools.get(handle).map_err(Refused::Code)?;
        let gone = pool.shrink(keep).into_iter().map(|address| (pool.device, address)).collect();
        self.unmap_segments(driver, gone);
        Ok(())
    }

    fn pool_set_access(&mut self, driver: &Driver, args: &mut Reader<'_>) -> Result<(), Refused> {
        let PoolSetAccess { pool: handle, device: ordinal, access } = PoolSetAccess::read(args)?;
        let device = self.device(ordinal)?;
        let owner = self.pools.get(handle).map_err(Refused::Code)?.device;
        let open = access == CU_MEM_ACCESS_READWRITE;
        // A device keeps access to its own memory, and no access is read-only here.
        if !open && access != 0 {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        }
        if owner as u64 == ordinal {
            return if open { Ok(()) } else { Err(Refused::Code(CUDA_ERROR_INVALID_DEVICE)) };
        }
        let mut can = 0;
        // SAFETY: the out parameter is a local.
        unsafe { (driver.cuDeviceCanAccessPeer)(&raw mut can, device, self.devices[owner].device) };
        if open && can == 0 {
            return Err(Refused::Code(CUDA_ERROR_INVALID_DEVICE));
        }
        let pool = self.pools.get(handle).map_err(Refused::Code)?;
        if open {
            pool.access.insert(ordinal as usize);
        } else {
            pool.access.remove(&(ordinal as usize));
        }
        let segments: Vec<u64> = pool.segment_addresses().collect();
        let memory = &mut self.devices[owner].memory;
        for address in segments {
            let changed =
                if open { memory.allow(driver, address, device) } else { memory.deny(driver, address, device) };
            changed.map_err(|failed| Refused::Code(failed.code))?;
        }
        Ok(())
    }

    fn pool_alloc(
        &mut self,
        call: &mut Call,
        frees: &mut impl DeferredFrees,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        let PoolAlloc { pool, bytes: size, stream } = PoolAlloc::read(args)?;
        let parameters = args.all();
        let key = call.stream_key(stream)?;
        let pool = if pool == 0 { self.pools.current(call.session.device_of_context(key.context)?) } else { pool };
        if size == 0 {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        }
        let wanted = PoolAllocation { pool, size, key };
        self.pools.get(pool).map_err(Refused::Code)?;
        self.pools.settle_for(call.driver(), pool);
        let result = self.allocate_from_pool(call, frees, &wanted, Some(stream), reply)?;
        if result != CUDA_ERROR_OUT_OF_MEMORY {
            return Ok(Outcome::Done(result));
        }
        // Frees that are deferred or under way may give the missing memory.
        let device = self.pools.get(pool).map_err(Refused::Code)?.device;
        if frees.defer_allocation(self, device, call.header, parameters) {
            return Ok(Outcome::Later);
        }
        let of_device = self.pools.by_handle.values().filter(|p| p.device == device);
        let mut streams: Vec<StreamKey> = of_device.flat_map(Pool::pending_streams).collect();
        streams.sort_unstable_by_key(|k| (k.context, k.handle, k.thread));
        streams.dedup();
        streams.retain(|key| call.session.waiting.real(*key).is_some());
        if streams.is_empty() {
            return Ok(Outcome::Done(result));
        }
        call.when_done(streams, Then::PoolAlloc { wanted, reply: call.header.reply })?;
        Ok(Outcome::Later)
    }

    /// `stream` is the stream as the command under way names it, if that command is the allocation. The stream may then be
    /// made to wait.
    pub(crate) fn allocate_from_pool(
        &mut self,
        call: &mut Call,
        frees: &mut impl DeferredFrees,
        wanted: &PoolAllocation,
        stream: Option<CUstream>,
        reply: &mut Writer,
    ) -> Result<CUresult, Refused> {
        let Some(length) = rounded(wanted.size) else { return Ok(CUDA_ERROR_OUT_OF_MEMORY) };
        let pool = self.pools.get(wanted.pool).map_err(Refused::Code)?;
        let device = pool.device;
        let mut size = wanted.size;
        let mut take_over = |memory: &Self, most| {
            let (address, allocation) = frees.take_over(memory, wanted, length, most)?;
            size = size.max(allocation.size);
            Some(address)
        };
        let taken = pool.take(length, wanted.key).or_else(|| take_over(self, length.saturating_mul(2)));
        let address = match taken {
            Some(address) => address,
            None => match self.grow_pool(call.driver(), wanted.pool, length) {
                Ok(()) => {
                    let pool = self.pools.get(wanted.pool).map_err(Refused::Code)?;
                    pool.take(length, wanted.key).ok_or(Refused::Code(CUDA_ERROR_OUT_OF_MEMORY))?
                }
                Err(MemoryError::Window(end)) if end != u64::MAX => {
                    reply.word(end);
                    reply.word(device as u64);
                    return Ok(WINDOW_FULL);
                }
                Err(error) => match self.take_behind_fence(call, wanted, stream, length)? {
                    Some(address) => address,
                    None => match take_over(self, u64::MAX) {
                        Some(address) => address,
                        None => return Ok(error.code()),
                    },
                },
            },
        };
        let allocation = Allocation { size, context: 0, pool: wanted.pool };
        self.devices[device].memory.add(address, allocation);
        reply.word(address);
        reply.word(device as u64);
        reply.word(wanted.pool);
        Ok(CUDA_SUCCESS)
    }

    /// Maps more memory for a pool: a segment. Where there is too little memory for a segment, maps no more than is needed,
    /// in the last attempt after taking the memory that other pools of the device do not use.
    fn grow_pool(&mut self, driver: &Driver, handle: u64, length: u64) -> Result<(), MemoryError> {
        let Some(pool) = self.pools.by_handle.get(&handle) else { return Err(MemoryError::Window(u64::MAX)) };
        let (device, access) = (pool.device, pool.access.clone());
        let mut result = Err(MemoryError::Window(u64::MAX));
        // Where there is too little memory for a segment, the pool grows by as little as it can.
        for (attempt, step) in [SEGMENT, MEMORY_GRANULARITY, MEMORY_GRANULARITY].into_iter().enumerate() {
            let size = length.next_multiple_of(step);
            if !self.pools.by_handle.get(&handle).is_some_and(|p| p.may_grow(size)) {
                continue;
            }
            if attempt == 2 && !self.shrink_pools(driver, device) {
                break;
            }
            result = self.devices[device].memory.map_segment(driver, size).map(|address| {
                if let Some(pool) = self.pools.by_handle.get_mut(&handle) {
                    pool.grow(address, size);
                }
                for other in access.iter().filter_map(|d| self.devices.get(*d)).map(|d| d.device).collect::<Vec<_>>() {
                    // Memory was opened to this device before, so there is no reason why this fails.
                    let _ = self.devices[device].memory.allow(driver, address, other);
                }
            });
            match result {
                Err(MemoryError::Driver(failed)) if failed.code == CUDA_ERROR_OUT_OF_MEMORY => {}
                _ => break,
            }
        }
        result
    }

    /// Takes memory that another stream has freed and whose free the device has not reached; the stream then waits for that
    /// free.
    fn take_behind_fence(
        &mut self,
        call: &mut Call,
        wanted: &PoolAllocation,
        stream: Option<CUstream>,
        length: u64,
    ) -> Result<Option<u64>, Refused> {
        let Some(stream) = stream else { return Ok(None) };
        let pool = self.pools.get(wanted.pool).map_err(Refused::Code)?;
        if !pool.allows_internal_dependencies() {
            return Ok(None);
        }
        let Some((address, fence)) = pool.take_behind_fence(length) else { return Ok(None) };
        let real = call.stream(stream)?;
        // SAFETY: both handles are the driver's own.
        match unsafe { (call.driver().cuStreamWaitEvent)(real, fence.event, 0) } {
            CUDA_SUCCESS => Ok(Some(address)),
            error => Err(Refused::Code(error)),
        }
    }

    fn pool_free(&mut self, call: &mut Call, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let PoolFree { address, stream } = PoolFree::read(args)?;
        let (ordinal, allocation) = self.find_allocation(address).ok_or(Refused::Code(CUDA_ERROR_INVALID_VALUE))?;
        let key = call.stream_key(stream)?;
        let real = call.stream(stream)?;
        if allocation.pool == 0 {
            call.when_done(vec![key], Then::Free { address, reply: 0 })?;
            return Ok(Outcome::Done(CUDA_SUCCESS));
        }
        let driver = call.driver();
        call.enter(key.context)?;
        let fence = self.pools.fence(driver, key.context).map_err(Refused::Code)?;
        // SAFETY: both handles are the driver's own.
        let recorded = unsafe { (driver.cuEventRecord)(fence.event, real) };
        self.devices[ordinal].memory.take_out(address);
        let length = rounded(allocation.size).unwrap_or(allocation.size);
        if let Some(pool) = self.pools.by_handle.get_mut(&allocation.pool) {
            pool.give_behind(address, length, key, fence);
        }
        Ok(Outcome::Done(recorded))
    }

    /// Ends the pools of a device whose context is reset, and all allocations from them. Nothing runs in any context, since
    /// other contexts may have used the pools.
    pub(crate) fn reset_pools(&mut self, driver: &Driver, device: usize) {
        let gone = self.pools.reset(device).into_iter().map(|address| (device, address)).collect();
        let memory = &mut self.devices[device].memory;
        let allocated: Vec<u64> =
            memory.allocations().iter().filter(|(_, a)| a.pool != 0).map(|(address, _)| *address).collect();
        allocated.into_iter().for_each(|address| memory.take_out(address));
        self.unmap_segments(driver, gone);
    }

    /// Maps the memory of an image's pools.
    pub(crate) fn restore_pools(&mut self, driver: &Driver) -> Result<(), NotLoaded> {
        for (device, address, length, access) in self.pools.segments() {
            let others: Vec<_> = access.iter().filter_map(|d| self.devices.get(*d)).map(|d| d.device).collect();
            let memory =
                &mut self.devices.get_mut(device).ok_or(NotLoaded::Image("a pool's device is not here"))?.memory;
            let failed = |source| NotLoaded::Memory { what: "a pool's", address, source };
            memory.map_segment_at(driver, address, length).map_err(failed)?;
            for other in others {
                memory.allow(driver, address, other).map_err(|e| failed(e.into()))?;
            }
        }
        Ok(())
    }

    /// Restores an allocation of an image that came from a pool.
    pub(crate) fn restore_pooled(
        &mut self,
        device: usize,
        address: u64,
        allocation: Allocation,
    ) -> Result<(), NotLoaded> {
        let wrong = || NotLoaded::OutsidePool(address);
        let length = rounded(allocation.size).ok_or_else(wrong)?;
        let pool = self.pools.by_handle.get_mut(&allocation.pool).filter(|p| p.device == device);
        if !pool.ok_or_else(wrong)?.take_at(address, length) {
            return Err(wrong());
        }
        self.devices[device].memory.add(address, allocation);
        Ok(())
    }
}

//! Return of pool memory: to its pool when it is freed, and from the pool to the device.

use crate::gpu::driver::Driver;
use crate::resources::Memory;
use crate::resources::memory::Allocation;
use crate::resources::pools::rounded;

impl Memory {
    /// Gives back the memory that pools hold beyond their thresholds, since the client has waited for something.
    pub(crate) fn release_pools(&mut self, driver: &Driver) {
        if self.pools.hold_memory() {
            self.pools.settle(driver);
            let surplus = self.pools.surplus();
            self.unmap_segments(driver, surplus);
        }
    }

    /// Gives back all memory that the pools of a device do not use, whatever their thresholds say. `false` if there is
    /// none.
    pub(crate) fn shrink_pools(&mut self, driver: &Driver, device: usize) -> bool {
        self.pools.settle(driver);
        let of_device = self.pools.by_handle.values_mut().filter(|p| p.device == device);
        let gone: Vec<(usize, u64)> = of_device.flat_map(|p| p.shrink(0)).map(|address| (device, address)).collect();
        let some = !gone.is_empty();
        self.unmap_segments(driver, gone);
        some
    }

    /// Unmaps memory of pools, given by devices and addresses.
    pub(crate) fn unmap_segments(&mut self, driver: &Driver, segments: Vec<(usize, u64)>) {
        for (device, address) in segments {
            if let Err(failed) = self.devices[device].memory.unmap_segment(driver, address) {
                tracing::warn!("memory of a pool at {address:#x} was not given back: {failed}");
            }
        }
    }

    /// The device and the allocation that begins at an address.
    pub(crate) fn find_allocation(&self, address: u64) -> Option<(usize, Allocation)> {
        let found = self.devices.iter().enumerate();
        let mut found = found.filter_map(|(i, d)| Some((i, *d.memory.allocations().get(&address)?)));
        found.next()
    }

    /// Executes `cuMemFree` of memory from a pool: the driver assumes that nothing uses it any more. `false` for other
    /// memory.
    pub(crate) fn free_to_pool(&mut self, address: u64) -> bool {
        let Some((ordinal, allocation)) = self.find_allocation(address).filter(|(_, a)| a.pool != 0) else {
            return false;
        };
        self.devices[ordinal].memory.take_out(address);
        let length = rounded(allocation.size).unwrap_or(allocation.size);
        if let Some(pool) = self.pools.by_handle.get_mut(&allocation.pool) {
            pool.give(address, length);
        }
        true
    }
}

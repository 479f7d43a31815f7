//! The memory that a command may name: the client's own memory, as far as the command's device may use it.

use rekindle_cuda_abi::types::*;
use rekindle_wire::window;

use crate::gpu::driver::Driver;
use crate::resources::Memory;
use crate::resources::globals::{Globals, is_global};
use crate::session::call::Call;
use crate::session::outcome::Refused;

impl Memory {
    /// Refuses an address of a copy that is neither in a window of the worker's nor left to the driver to judge. The
    /// worker's own memory must not be read or written for a client. Device addresses outside the windows are globals,
    /// which the driver knows, and which never are host memory of the worker's.
    pub(crate) fn reachable(&self, globals: &Globals, address: u64, bytes: u64) -> Result<(), Refused> {
        let end = address.checked_add(bytes).ok_or(Refused::Code(CUDA_ERROR_INVALID_VALUE))?;
        let in_device = self.devices.iter().any(|d| {
            let allocations = d.memory.allocations();
            allocations.range(..=address).next_back().is_some_and(|(a, x)| end <= a + x.size)
        });
        let in_pinned = || {
            let allocations = self.pinned.allocations();
            allocations.range(..=address).next_back().is_some_and(|(a, x)| end <= a + x.size)
        };
        if in_device || in_pinned() || self.vmm.covers(address, bytes) || is_global(globals, address, bytes) {
            return Ok(());
        }
        Err(Refused::Code(CUDA_ERROR_INVALID_VALUE))
    }

    /// Lets the current context's device use memory of another device that a copy names. Memory that the driver allocated
    /// is open already; mapped pieces are not.
    pub(crate) fn allow_peer(&mut self, call: &Call, address: u64) -> Result<(), Refused> {
        let Some(owner) = window::device_of(address) else { return Ok(()) };
        let here = call.device()?;
        // Where the memory cannot be opened, the driver copies through the host, or says that it does not.
        if owner == here || !self.may_access(call.driver(), here, owner) {
            return Ok(());
        }
        let (driver, device) = (call.driver(), self.devices[here].device);
        let Some(memory) = self.devices.get_mut(owner).map(|d| &mut d.memory) else { return Ok(()) };
        memory.allow(driver, address, device).map_err(|failed| Refused::Code(failed.code))
    }

    /// Frees device memory that nothing uses any more.
    pub(crate) fn free_memory(&mut self, driver: &Driver, address: u64) -> CUresult {
        for device in &mut self.devices {
            match device.memory.free(driver, address) {
                Some(Ok(())) => return CUDA_SUCCESS,
                Some(Err(failed)) => return failed.code,
                None => {}
            }
        }
        CUDA_ERROR_INVALID_VALUE
    }

    /// The primary context of the first device, in which host memory is registered for all devices; 0 where there is no
    /// device.
    pub(crate) fn first_primary(&self) -> CUcontext {
        self.devices.first().map_or(0, |device| device.primary)
    }

    /// The driver's device with the worker's number.
    pub(crate) fn device(&self, ordinal: u64) -> Result<CUdevice, Refused> {
        let device = usize::try_from(ordinal).ok().and_then(|o| self.devices.get(o));
        device.map(|d| d.device).ok_or(Refused::Code(CUDA_ERROR_INVALID_DEVICE))
    }

    /// The compute capability by which an image's entry is chosen. Devices of several kinds in one worker are not supported
    /// yet, and the worker says so when it starts.
    pub(crate) fn capability(&self) -> (u32, u32) {
        self.devices.first().map_or((0, 0), |d| d.capability)
    }
}

//! What the configuration lets one client have of the machine's memory: more is out of memory, as if the device, or the
//! host, had no more.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::control::Limits;
use rekindle_wire::nvml::Memory;

use super::commands::check;
use super::executor::{Executor, Outcome, Refused};

const OUT_OF_MEMORY: Refused = Refused::Code(CUDA_ERROR_OUT_OF_MEMORY);

impl Executor {
    /// From here on no more than this. What the client has already it keeps.
    pub(crate) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
        for device in &mut self.devices {
            device.memory.set_limit(limits.device_memory.unwrap_or(u64::MAX));
        }
    }

    /// Whether an array of this size may be made on a device. Other memory is checked where it is mapped.
    pub(crate) fn array_fits(&self, device: usize, bytes: u64) -> Result<(), Refused> {
        let memory = self.devices.get(device).map(|d| &d.memory);
        if memory.is_some_and(|m| m.room() >= bytes) { Ok(()) } else { Err(OUT_OF_MEMORY) }
    }

    /// Whether so much more may be pinned.
    pub(crate) fn pinned_fits(&self, bytes: u64) -> Result<(), Refused> {
        let pinned: u64 = self.pinned.allocations().values().map(|p| p.size).sum();
        let limit = self.limits.pinned_memory.unwrap_or(u64::MAX);
        if pinned.saturating_add(bytes) <= limit { Ok(()) } else { Err(OUT_OF_MEMORY) }
    }

    /// What is free and what there is on each device, whatever the client may have.
    pub(crate) fn memory_of_devices(&mut self) -> Result<Vec<Memory>, Refused> {
        let primaries: Vec<_> = self.devices.iter().map(|d| d.primary).collect();
        let memory = primaries.into_iter().map(|primary| {
            self.enter_real(primary)?;
            let (mut free, mut total) = (0, 0);
            // SAFETY: the out parameters are locals.
            check(unsafe { (self.driver().cuMemGetInfo_v2)(&raw mut free, &raw mut total) })?;
            Ok(Memory { total: total as u64, free: free as u64, reserved: 0 })
        });
        memory.collect()
    }

    /// What is free and what there is: of the device, or of what the client may have.
    pub(crate) fn mem_info(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        args.end()?;
        let device = self.device_of_context(self.header.context)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the out parameters are locals.
        check(unsafe { (self.driver().cuMemGetInfo_v2)(&raw mut free, &raw mut total) })?;
        let room = self.devices.get(device).map_or(0, |d| d.memory.room());
        reply.word((free as u64).min(room));
        reply.word((total as u64).min(self.limits.device_memory.unwrap_or(u64::MAX)));
        Ok(Outcome::Done(CUDA_SUCCESS))
    }
}

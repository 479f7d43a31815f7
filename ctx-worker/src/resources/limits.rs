//! What the configuration lets one client have of the machine's memory: more is out of memory, as if the device, or the
//! host, had no more.

use std::fs::File;
use std::sync::Arc;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::MemInfo;
use rekindle_wire::control::{ContainerLimits, Limits};
use rekindle_wire::nvml;
use thiserror::Error;

use crate::gpu::Gpu;
use crate::gpu::driver::Driver;
use crate::resources::Memory;
use crate::session::Session;
use crate::session::call::Call;
use crate::session::outcome::{Outcome, Refused, check};
use crate::session::share::Share;

const OUT_OF_MEMORY: Refused = Refused::Code(CUDA_ERROR_OUT_OF_MEMORY);

/// Why a client does not count with others of its container.
#[derive(Debug, Error)]
#[error("there is no such row in a container's table")]
pub(crate) struct NoRow;

impl Memory {
    /// From here on no more than this. What the client has already it keeps.
    pub(crate) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
        for device in &mut self.devices {
            device.memory.set_limit(limits.device_memory.unwrap_or(u64::MAX));
        }
    }

    /// What the client has counts with what others of its container have; what it has already it keeps.
    pub(crate) fn belong(
        &mut self,
        session: &Session,
        table: File,
        row: u32,
        gpus: &[[u8; 16]],
        limits: ContainerLimits,
    ) -> Result<(), NoRow> {
        let sees = session.attached.devices.iter().map(|it| it.uuid);
        let row = usize::try_from(row).unwrap_or(usize::MAX);
        let share = Share::new(table, row, limits, gpus, sees).ok_or(NoRow)?;
        for (at, device) in self.devices.iter_mut().enumerate() {
            device.memory.belong(Arc::clone(&share), at);
        }
        self.pinned.belong(share);
        Ok(())
    }

    /// Makes what takes memory on a device and is not mapped there, where the client may have so much more. It is counted
    /// before it is made: of processes that share a limit, all might find room for the same bytes.
    pub(crate) fn make_counted<T>(
        &mut self,
        driver: &Driver,
        device: usize,
        bytes: u64,
        make: impl Fn() -> Result<T, CUresult>,
    ) -> Result<T, Refused> {
        let counted = |memory: &Self| match memory.devices.get(device) {
            Some(d) if d.memory.take_share(bytes) => make().inspect_err(|_| d.memory.publish()),
            _ => Err(CUDA_ERROR_OUT_OF_MEMORY),
        };
        let mut made = counted(self);
        // What pools hold and do not use is there to be had.
        if matches!(made, Err(CUDA_ERROR_OUT_OF_MEMORY)) && self.shrink_pools(driver, device) {
            made = counted(self);
        }
        made.map_err(Refused::Code)
    }

    /// Whether so much more may be pinned.
    pub(crate) fn pinned_fits(&self, bytes: u64) -> Result<(), Refused> {
        let pinned = self.pinned.bytes();
        let limit = self.limits.pinned_memory.unwrap_or(u64::MAX);
        let fits = pinned.saturating_add(bytes) <= limit && self.pinned.take(bytes);
        if fits { Ok(()) } else { Err(OUT_OF_MEMORY) }
    }

    /// What is free and what there is on each device, whatever the client may have.
    pub(crate) fn memory_of_devices(&self, gpu: &mut Gpu) -> Result<Vec<nvml::Memory>, Refused> {
        let primaries: Vec<_> = self.devices.iter().map(|d| d.primary).collect();
        let memory = primaries.into_iter().map(|primary| {
            gpu.enter(primary).map_err(Refused::Code)?;
            let (mut free, mut total) = (0, 0);
            // SAFETY: the out parameters are locals.
            check(unsafe { (gpu.driver.cuMemGetInfo_v2)(&raw mut free, &raw mut total) })?;
            Ok(nvml::Memory { total: total as u64, free: free as u64, reserved: 0 })
        });
        memory.collect()
    }

    /// What is free and what there is: of the device, or of what the client may have.
    pub(crate) fn mem_info(
        &self,
        call: &Call,
        taken_by_clones: u64,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        MemInfo::read(args)?;
        let device = call.device()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the out parameters are locals.
        check(unsafe { (call.driver().cuMemGetInfo_v2)(&raw mut free, &raw mut total) })?;
        let room = self.devices.get(device).map_or(0, |d| d.memory.room());
        // What clones take for a while is the client's to have.
        let free = (free as u64).saturating_add(taken_by_clones);
        reply.word(free.min(room));
        let most = self.devices.get(device).map_or(u64::MAX, |d| d.memory.most());
        reply.word((total as u64).min(most));
        Ok(Outcome::Done(CUDA_SUCCESS))
    }
}

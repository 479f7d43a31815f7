//! What the configuration lets one client have of the machine's memory: more is out of memory, as if the device, or the
//! host, had no more.

use std::fs::File;
use std::sync::Arc;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::control::{ContainerLimits, Limits};
use rekindle_wire::nvml::Memory;
use thiserror::Error;

use crate::serve::executor::Executor;
use crate::session::outcome::{Outcome, Refused, check};
use crate::session::share::Share;

const OUT_OF_MEMORY: Refused = Refused::Code(CUDA_ERROR_OUT_OF_MEMORY);

/// Why a client does not count with others of its container.
#[derive(Debug, Error)]
#[error("there is no such row in a container's table")]
pub(crate) struct NoRow;

impl Executor {
    /// From here on no more than this. What the client has already it keeps.
    pub(crate) fn set_limits(&mut self, limits: Limits) {
        self.memory.limits = limits;
        for device in &mut self.memory.devices {
            device.memory.set_limit(limits.device_memory.unwrap_or(u64::MAX));
        }
    }

    /// What the client has counts with what others of its container have; what it has already it keeps.
    pub(crate) fn belong(
        &mut self,
        table: File,
        row: u32,
        gpus: &[[u8; 16]],
        limits: ContainerLimits,
    ) -> Result<(), NoRow> {
        let sees = self.session.attached.devices.iter().map(|it| it.uuid);
        let row = usize::try_from(row).unwrap_or(usize::MAX);
        let share = Share::new(table, row, limits, gpus, sees).ok_or(NoRow)?;
        for (at, device) in self.memory.devices.iter_mut().enumerate() {
            device.memory.belong(Arc::clone(&share), at);
        }
        self.memory.pinned.belong(share);
        Ok(())
    }

    /// Makes what takes memory on a device and is not mapped there, where the client may have so much more. It is counted
    /// before it is made: of processes that share a limit, all might find room for the same bytes.
    pub(crate) fn make_counted<T>(
        &mut self,
        device: usize,
        bytes: u64,
        make: impl Fn() -> Result<T, CUresult>,
    ) -> Result<T, Refused> {
        let counted = |executor: &Self| match executor.memory.devices.get(device) {
            Some(d) if d.memory.take_share(bytes) => make().inspect_err(|_| d.memory.publish()),
            _ => Err(CUDA_ERROR_OUT_OF_MEMORY),
        };
        let mut made = counted(self);
        // What pools hold and do not use is there to be had.
        if matches!(made, Err(CUDA_ERROR_OUT_OF_MEMORY)) && self.shrink_pools(device) {
            made = counted(self);
        }
        made.map_err(Refused::Code)
    }

    /// Whether so much more may be pinned.
    pub(crate) fn pinned_fits(&self, bytes: u64) -> Result<(), Refused> {
        let pinned = self.memory.pinned.bytes();
        let limit = self.memory.limits.pinned_memory.unwrap_or(u64::MAX);
        let fits = pinned.saturating_add(bytes) <= limit && self.memory.pinned.take(bytes);
        if fits { Ok(()) } else { Err(OUT_OF_MEMORY) }
    }

    /// What is free and what there is on each device, whatever the client may have.
    pub(crate) fn memory_of_devices(&mut self) -> Result<Vec<Memory>, Refused> {
        let primaries: Vec<_> = self.memory.devices.iter().map(|d| d.primary).collect();
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
        let room = self.memory.devices.get(device).map_or(0, |d| d.memory.room());
        // What clones take for a while is the client's to have.
        let free = (free as u64).saturating_add(self.taken_by_clones(device));
        reply.word(free.min(room));
        let most = self.memory.devices.get(device).map_or(u64::MAX, |d| d.memory.most());
        reply.word((total as u64).min(most));
        Ok(Outcome::Done(CUDA_SUCCESS))
    }
}

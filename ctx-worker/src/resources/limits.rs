//! Limits that the configuration sets to one client's use of the machine's memory. An allocation above a limit fails as out
//! of memory, as if the device, or the host, had no more.

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
use crate::resources::shortage::{Shortage, bytes_to_be_free};
use crate::session::Session;
use crate::session::call::Call;
use crate::session::outcome::{Outcome, Refused, check};
use crate::session::share::{Share, Withdrawn};

const OUT_OF_MEMORY: Refused = Refused::Code(CUDA_ERROR_OUT_OF_MEMORY);

/// Why a client cannot be counted with others of its container.
#[derive(Debug, Error)]
#[error("there is no such row in a container's table")]
pub(crate) struct NoRow;

impl Memory {
    /// Sets the limits from here on. The client keeps the memory that it already has.
    pub(crate) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
        for device in &mut self.devices {
            device.memory.set_limit(limits.device_memory.unwrap_or(u64::MAX).min(device.most));
        }
    }

    /// Counts the client's memory with that of other clients of its container. The client keeps the memory that it already
    /// has.
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

    /// Counts no memory of this worker's any more: another worker is to take the client over, and counts it.
    pub(crate) fn count_no_more(&self) -> Vec<Withdrawn> {
        let devices = self.devices.iter().filter_map(|device| device.memory.count_no_more());
        devices.chain(self.pinned.count_no_more()).collect()
    }

    /// Makes an object that takes memory on a device and is not mapped there, where the client may have so many more bytes.
    /// The bytes are counted before the object is made: otherwise all processes that share a limit might find room for the
    /// same bytes.
    pub(crate) fn make_counted<T>(
        &mut self,
        driver: &Driver,
        device: usize,
        bytes: u64,
        make: impl Fn() -> Result<T, CUresult>,
    ) -> Result<T, Refused> {
        let counted = |memory: &Self| match memory.devices.get(device) {
            Some(d) if d.memory.take_share(bytes) => {
                let made = make().inspect_err(|_| d.memory.publish());
                d.memory.note_result(bytes, made.as_ref().err().copied().unwrap_or(CUDA_SUCCESS));
                made
            }
            _ => Err(CUDA_ERROR_OUT_OF_MEMORY),
        };
        let mut made = counted(self);
        // Memory that pools hold and do not use is available.
        if matches!(made, Err(CUDA_ERROR_OUT_OF_MEMORY)) && self.shrink_pools(driver, device) {
            made = counted(self);
        }
        made.map_err(Refused::Code)
    }

    /// Whether so many more bytes may be pinned.
    pub(crate) fn pinned_fits(&self, bytes: u64) -> Result<(), Refused> {
        let pinned = self.pinned.bytes();
        let limit = self.limits.pinned_memory.unwrap_or(u64::MAX);
        let fits = pinned.saturating_add(bytes) <= limit && self.pinned.take(bytes);
        if fits { Ok(()) } else { Err(OUT_OF_MEMORY) }
    }

    /// The free and the total memory of each device, whatever the client's limits are.
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

    /// The bytes that must be free on each device for the allocation that has just failed; empty if free memory would not help.
    /// `by_driver` is the device for which the driver itself wanted memory, if the failed command allocates none for the client.
    pub(crate) fn needs(&self, gpu: &mut Gpu, by_driver: Option<usize>) -> Vec<u64> {
        let short = self.devices.iter().map(|device| device.memory.take_shortage());
        let mut short: Vec<_> = short.collect();
        if let Some(wanting) = by_driver {
            // Nobody says how much the driver wants.
            let of_driver = |place| if place == wanting { Shortage::Device(0) } else { Shortage::None };
            short = (0..short.len()).map(of_driver).collect();
        }
        let is_short = |it: &Shortage| matches!(it, Shortage::Device(_));
        if !short.iter().any(is_short) {
            return Vec::new();
        }
        let Ok(memory) = self.memory_of_devices(gpu) else { return Vec::new() };
        let free = memory.into_iter().map(|it| it.free);
        free.zip(short).map(|(free, short)| bytes_to_be_free(free, short)).collect()
    }

    /// The free and the total memory: of the device, or of the client's limit.
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
        // Memory that clones take for a while is available to the client.
        let free = (free as u64).saturating_add(taken_by_clones);
        reply.word(free.min(room));
        let most = self.devices.get(device).map_or(u64::MAX, |d| d.memory.most());
        reply.word((total as u64).min(most));
        Ok(Outcome::Done(CUDA_SUCCESS))
    }
}

//! Many ranges that are made one after the other, and finished together.

use rekindle_cuda_abi::types::CU_MEM_ACCESS_READWRITE;

use super::DeviceMemory;
use super::access::set_access;
use super::runs::Runs;
use super::to_map::{ToMap, Unfinished};
use crate::gpu::driver::{CallFailed, Driver};

impl DeviceMemory {
    /// Does something that maps many ranges. They get their access at its end, side by side ones at once: the driver takes much longer
    /// for that than for all else, and about as long for many ranges as for one.
    ///
    /// # Errors
    /// The error of `map`, or of the driver. Ranges may be without access then.
    pub(crate) fn map_many<E: From<CallFailed>>(
        &mut self,
        driver: &Driver,
        map: impl FnOnce(&mut Self) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mapped, unfinished, to_admit) = self.leave_unfinished(Unfinished::Closed(Runs::default()), map);
        mapped?;
        if let Some(Unfinished::Closed(closed)) = unfinished {
            let mut runs = closed.iter();
            runs.try_for_each(|(base, length)| set_access(driver, base, length, self.device, CU_MEM_ACCESS_READWRITE))?;
        }
        to_admit.into_iter().for_each(|base| self.admit(driver, base));
        Ok(())
    }

    /// Does something that maps many ranges, but neither makes nor maps their memory: that is left to the caller, who tells
    /// [`DeviceMemory::take_made`] of it. No other device may use this memory yet.
    ///
    /// # Errors
    /// The error of `map`.
    pub(crate) fn plan_many<E>(&mut self, map: impl FnOnce(&mut Self) -> Result<(), E>) -> Result<ToMap, E> {
        debug_assert!(self.peers.is_empty());
        let (planned, unfinished, _) = self.leave_unfinished(Unfinished::Planned(Vec::new()), map);
        planned?;
        let Some(Unfinished::Planned(pieces)) = unfinished else { return Ok(ToMap::new(self.device, Vec::new())) };
        Ok(ToMap::new(self.device, pieces))
    }

    /// Takes the memory that was made for what was planned here. That of other devices is left alone.
    pub(crate) fn take_made(&mut self, mapped: &ToMap) {
        mapped.made(self.device).for_each(|(address, piece)| self.put_piece(address, piece));
    }

    /// The result of `map`, what is left to be done for its ranges, and where other devices get access after that.
    fn leave_unfinished<T>(
        &mut self,
        unfinished: Unfinished,
        map: impl FnOnce(&mut Self) -> T,
    ) -> (T, Option<Unfinished>, Vec<u64>) {
        self.unfinished = Some(unfinished);
        let mapped = map(self);
        (mapped, self.unfinished.take(), std::mem::take(&mut self.to_admit))
    }
}

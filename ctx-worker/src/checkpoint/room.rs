//! Memory that is reserved before a quiesce: device memory for clones, which goes back when the client needs it, and host
//! memory for pieces on their way into a file.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::copying::Clones;
use crate::checkpoint::copying::background::GIVEN_UP;
use crate::checkpoint::copying::error::CopyError;
use crate::checkpoint::copying::reserving::Reserving;
use crate::checkpoint::engine::StageError;
use crate::gpu::driver::Driver;
use crate::resources::Memory;

/// How soon a thread that waits for clones to be released notices that nobody waits any longer.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

impl Checkpoint {
    /// Reserves device memory for clones, and calls `done` afterwards.
    pub(crate) fn reserve_clones(
        &mut self,
        driver: &'static Driver,
        memory: &Memory,
        bytes: Option<u64>,
        done: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<()> {
        let devices: Vec<_> = memory.devices.iter().map(|d| (d.device, d.primary)).collect();
        let has = |ordinal: usize| {
            let allocated = memory.devices.get(ordinal).map_or(0, |d| d.memory.bytes());
            allocated.saturating_add(memory.vmm.bytes(ordinal))
        };
        // Each job begins at an aligned address.
        let wanted: Vec<u64> =
            (0..devices.len()).map(|i| has(i).min(bytes.unwrap_or(u64::MAX))).map(|b| b + b / 64).collect();
        let reserved = Arc::clone(&self.copying.reserved);
        let before = self.copying.background.as_ref().map(|background| Arc::clone(&background.copying));
        let hurry = Arc::new(AtomicBool::new(false));
        let hurries = Arc::clone(&hurry);
        let work = move || {
            // A copy that was given up still has its clones at the addresses of the new ones.
            if let Some(before) = before.filter(|before| before.has_failed()) {
                let until = Instant::now() + GIVEN_UP;
                while !hurries.load(Relaxed) && Instant::now() < until && !before.wait_until_over_for(POLL_INTERVAL) {}
            }
            let clones = Clones::reserve(driver, &devices, &wanted);
            let former = reserved.lock().ok().and_then(|mut reserved| reserved.replace(clones));
            former.into_iter().for_each(|former| former.release(driver));
            done();
        };
        self.join_reserving();
        self.copying.reserving = Some(Reserving::begin(hurry, work)?);
        Ok(())
    }

    /// Maps host memory that the daemon lends.
    pub(crate) fn set_stage(
        &mut self,
        memory: &mut Memory,
        unit: u64,
        units: Vec<u64>,
        new: Vec<(u64, OwnedFd)>,
        done: impl FnOnce(Result<(), StageError>) + Send + 'static,
    ) -> Result<(), CopyError> {
        match units.is_empty() {
            true => self.discard_cancelled(memory),
            false => self.discard_finished(memory),
        }
        // The result of a copy is kept for the request that asks for it.
        let Some(engine) = self.engine.as_ref().filter(|_| self.copying.background.is_none()) else {
            // Pieces on the stage stay until they are written, and no more are put there.
            self.stage.end();
            return Err(CopyError::Already);
        };
        let stage = engine.stage.clone();
        self.join_reserving();
        let work = move || done(stage.set(unit, &units, new));
        self.copying.reserving = Some(Reserving::begin(Arc::default(), work).map_err(CopyError::Spawn)?);
        Ok(())
    }

    /// Waits until a reservation that is under way has ended, with the memory that is free now.
    pub(crate) fn join_reserving(&mut self) {
        if let Some(reserving) = self.copying.reserving.take() {
            reserving.join();
        }
    }

    /// Bytes of a device's memory that clones occupy.
    pub(crate) fn taken_by_clones(&self, device: usize) -> u64 {
        let aside = self.copying.reserved.lock().ok().and_then(|reserved| Some(reserved.as_ref()?.bytes(device)));
        let used = self.copying.background.as_ref().map(|background| background.copying.reserved(device));
        aside.unwrap_or(0).saturating_add(used.unwrap_or(0))
    }

    /// Called when the client's allocation found no memory. Returns whether there may be memory now, after clones of this or
    /// other processes have been given up or copied, or other processes were suspended. `first`: the command has not been
    /// retried yet. `needs` returns the bytes that must be free on each device.
    pub(crate) fn make_room(
        &mut self,
        driver: &Driver,
        devices: usize,
        first: bool,
        needs: &mut dyn FnMut() -> Vec<u64>,
    ) -> bool {
        self.join_reserving();
        if (0..devices).all(|device| self.taken_by_clones(device) == 0) {
            return self.copying.memory_pressure.as_ref().is_some_and(|is_coming| is_coming(first, needs));
        }
        self.give_up_reserved(driver);
        // A copy that was given up may hang because a disk hangs.
        self.copying.background.as_ref().is_none_or(|background| background.copying.wait_unless_failed())
    }

    /// Called when another client finds no memory: releases reserved memory that is not used yet.
    pub(crate) fn give_way(&mut self, driver: &Driver) {
        self.join_reserving();
        self.give_up_reserved(driver);
    }

    /// Releases reserved device memory that is not used.
    pub(crate) fn give_up_reserved(&mut self, driver: &Driver) {
        let reserved = self.copying.reserved.lock().ok().and_then(|mut reserved| reserved.take());
        reserved.into_iter().for_each(|reserved| reserved.release(driver));
    }
}

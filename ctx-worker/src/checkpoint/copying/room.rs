//! Memory that is set aside before a quiesce: of the device for clones, and what happens to it when the client needs it; of
//! the host for what is on its way into a file.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::background::GIVEN_UP;
use super::{Clones, CopyError};
use crate::checkpoint::engine::StageError;
use crate::serve::executor::Executor;
use crate::signal_stack::Thread;

/// How soon who waits for clones to go sees that nobody waits any longer.
const LOOK: Duration = Duration::from_millis(5);

/// A thread that sets memory aside.
pub(crate) struct Reserving {
    thread: JoinHandle<()>,
    /// Somebody waits for it.
    hurry: Arc<AtomicBool>,
}

impl Executor {
    /// Sets device memory aside for clones, and says `done` when that has been done.
    pub(crate) fn reserve_clones(
        &mut self,
        bytes: Option<u64>,
        done: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<()> {
        let devices: Vec<_> = self.memory.devices.iter().map(|d| (d.device, d.primary)).collect();
        let has = |ordinal: usize| {
            let memory = self.memory.devices.get(ordinal).map_or(0, |d| d.memory.bytes());
            memory.saturating_add(self.memory.vmm.bytes(ordinal))
        };
        // Each job begins at a boundary of its own.
        let wanted: Vec<u64> =
            (0..devices.len()).map(|i| has(i).min(bytes.unwrap_or(u64::MAX))).map(|b| b + b / 64).collect();
        let (driver, reserved) = (self.driver(), Arc::clone(&self.checkpoint.copying.reserved));
        let before = self.checkpoint.copying.background.as_ref().map(|background| Arc::clone(&background.copying));
        let hurry = Arc::new(AtomicBool::new(false));
        let hurries = Arc::clone(&hurry);
        let work = move || {
            // One that was given up has its clones where these are to be.
            if let Some(before) = before.filter(|before| before.has_failed()) {
                let until = Instant::now() + GIVEN_UP;
                while !hurries.load(Relaxed) && Instant::now() < until && !before.wait_until_over_for(LOOK) {}
            }
            let clones = Clones::reserve(driver, &devices, &wanted);
            let former = reserved.lock().ok().and_then(|mut reserved| reserved.replace(clones));
            former.into_iter().for_each(|former| former.release(driver));
            done();
        };
        self.join_reserving();
        self.checkpoint.copying.reserving = Some(Reserving { thread: Thread::named("reserve").spawn(work)?, hurry });
        Ok(())
    }

    /// Maps what the daemon lends of its host memory, and says whether that is done.
    pub(crate) fn set_stage(
        &mut self,
        unit: u64,
        units: Vec<u64>,
        new: Vec<(u64, OwnedFd)>,
        done: impl FnOnce(Result<(), StageError>) + Send + 'static,
    ) -> Result<(), CopyError> {
        match units.is_empty() {
            true => self.discard_cancelled(),
            false => self.discard_finished(),
        }
        // What came of a copy is told to who asks about it, and not lost for this.
        let Some(engine) = self.checkpoint.engine.as_ref().filter(|_| self.checkpoint.copying.background.is_none())
        else {
            // What lies there stays until it is written, and no more is put there.
            self.checkpoint.stage.end();
            return Err(CopyError::Already);
        };
        let stage = engine.stage.clone();
        self.join_reserving();
        let work = move || done(stage.set(unit, &units, new));
        let thread = Thread::named("reserve").spawn(work).map_err(CopyError::Spawn)?;
        self.checkpoint.copying.reserving = Some(Reserving { thread, hurry: Arc::default() });
        Ok(())
    }

    /// Waits until memory has been set aside that is being so: with what there is now.
    pub(crate) fn join_reserving(&mut self) {
        if let Some(Reserving { thread, hurry }) = self.checkpoint.copying.reserving.take() {
            hurry.store(true, Relaxed);
            drop(thread.join());
        }
    }

    /// Bytes of a device's memory that clones take.
    pub(crate) fn taken_by_clones(&self, device: usize) -> u64 {
        let aside =
            self.checkpoint.copying.reserved.lock().ok().and_then(|reserved| Some(reserved.as_ref()?.bytes(device)));
        let used = self.checkpoint.copying.background.as_ref().map(|background| background.copying.reserved(device));
        aside.unwrap_or(0).saturating_add(used.unwrap_or(0))
    }

    /// There is no memory for what the client asks for: whether there may be now, after clones have been given up, or
    /// copied, its own or others'. `first`: the command has not tried again yet.
    pub(crate) fn make_room(&mut self, first: bool) -> bool {
        self.join_reserving();
        if (0..self.memory.devices.len()).all(|device| self.taken_by_clones(device) == 0) {
            return self.checkpoint.copying.memory_pressure.as_ref().is_some_and(|is_coming| is_coming(first));
        }
        self.give_up_reserved();
        // One that was given up may hang for a disk's sake.
        self.checkpoint.copying.background.as_ref().is_none_or(|background| background.copying.wait_unless_failed())
    }

    /// Another client finds no memory: what is set aside and not used yet is given back.
    pub(crate) fn give_way(&mut self) {
        self.join_reserving();
        self.give_up_reserved();
    }

    /// Gives back device memory that was set aside and is not used.
    pub(crate) fn give_up_reserved(&mut self) {
        let reserved = self.checkpoint.copying.reserved.lock().ok().and_then(|mut reserved| reserved.take());
        reserved.into_iter().for_each(|reserved| reserved.release(self.driver()));
    }
}

//! The copy engine: moves pieces between the device and the image's data files, several at a time.
//!
//! ```text
//!   save   device ──copy──> lane's pinned buffer ──┬──────────────────────> hash, as expected? write ──> data file
//!                                                  └─ room there? ─> stage ─(later)─┘
//!   load   data file ──read──> lane's pinned buffer ──copy──> device ──(later)─> hash, as expected?
//! ```
//!
//! Each lane is a thread with pinned memory of its own. There are more lanes than cores to save, since a lane waits while its
//! buffer is filled: 16 cores bring 46 GB/s into files in memory with 16 lanes, and 50 with 24 (`tests/facts/draining.cu`). To load
//! there is a lane for each core, with two buffers: its own, and that of a lane that only saves, as far as there are such. How they
//! save is in [`out`], and how they load in [`fill`]. All lanes copy in one stream of each device, so that the link goes from one piece
//! to the next at once: between copies of different streams it stands still for 20 us, a quarter of the time that a piece takes. Buffers
//! and streams are made before there is a client: the engine never allocates or uses the legacy stream while it copies.

pub(crate) mod bench;
mod buffers;
mod fill;
mod lane;
mod out;
mod pace;
mod peek;
pub(crate) mod sinks;
mod stage;
pub(crate) mod unit;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use rekindle_cuda_abi::types::*;
use rekindle_images::DataWriter;
use tracing::debug;

pub(crate) use self::buffers::Buffers;
pub(crate) use self::fill::{Fill, Part};
use self::lane::{Lane, Way};
use self::out::Out;
pub(crate) use self::pace::Pace;
pub(crate) use self::peek::Peek;
pub(crate) use self::stage::{Stage, StageError};
use crate::checkpoint::copying::Copying;
use crate::gpu::driver::{CallFailed, Driver, checked};
use crate::resources::job::EngineError;
use crate::signal_stack::Thread;

const LANE_STACK: usize = 1 << 20;
/// All lanes.
pub(crate) struct Engine {
    lanes: Vec<Lane>,
    /// The engine's stream in each device's primary context.
    streams: Vec<Option<CUstream>>,
    count: usize,
    /// The number of lanes that load.
    loading: usize,
    /// The number of lanes that work while the application runs.
    few: usize,
    /// The buffers that lanes copy into.
    pub(crate) buffers: Buffers,
    /// Host memory in which pieces may wait.
    pub(crate) stage: Stage,
    /// How fast copies out of devices may be.
    pub(crate) pace: Pace,
}

impl Engine {
    /// An engine with as many lanes as copying can use threads on this machine.
    pub(crate) fn new() -> Self {
        let cores = crate::cores::cores();
        let (count, loading, few) = ((cores * 3 / 2).clamp(1, 24), cores.clamp(1, 16), (cores / 2).clamp(1, 8));
        let (buffers, stage, pace) = (Buffers::default(), Stage::default(), Pace::default());
        Self { lanes: Vec::new(), streams: Vec::new(), count, loading, few, buffers, stage, pace }
    }

    /// How many buffers the lanes have.
    fn buffers_of_lanes(&self) -> usize {
        self.count.max(2 * self.loading)
    }

    /// Makes missing buffers and streams. `primaries` are the devices' primary contexts.
    pub(crate) fn prepare(&mut self, driver: &Driver, primaries: &[CUcontext]) -> Result<(), CallFailed> {
        const NON_BLOCKING: u32 = 1;
        const DISABLE_TIMING: u32 = 2;
        let Some(&first) = primaries.first() else { return Ok(()) };
        while self.lanes.len() < self.count {
            self.lanes.push(Lane::new(primaries.len()));
        }
        self.streams.resize(primaries.len(), None);
        for (slot, &primary) in self.streams.iter_mut().zip(primaries).filter(|(slot, _)| slot.is_none()) {
            let mut stream = 0;
            // SAFETY: out parameters are locals; the context is the driver's own.
            unsafe {
                checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(primary))?;
                checked("cuStreamCreate", (driver.cuStreamCreate)(&raw mut stream, NON_BLOCKING))?;
            }
            *slot = Some(stream);
        }
        for (number, lane) in self.lanes.iter_mut().enumerate() {
            // SAFETY: the context is the driver's own.
            unsafe { checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(first))? };
            lane.buffer = self.buffers.prepare(driver, number)?;
            if number < self.loading {
                lane.second = self.buffers.prepare(driver, self.loading + number)?;
            }
            for ((slot, &stream), &primary) in lane.ways.iter_mut().zip(&self.streams).zip(primaries) {
                if let (None, Some(stream)) = (&slot, stream) {
                    let mut done = 0;
                    // SAFETY: as above.
                    unsafe {
                        checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(primary))?;
                        checked("cuEventCreate", (driver.cuEventCreate)(&raw mut done, DISABLE_TIMING))?;
                    }
                    *slot = Some(Way { primary, stream, done });
                }
            }
        }
        Ok(())
    }

    /// Runs every lane's thread once, so that their stacks are mapped before there is a client, see [`crate::serve::start`].
    pub(crate) fn warm_up(&self) {
        // The two further threads are the one that starts the lanes while a client runs, and one that writes code meanwhile.
        let count = self.lanes.len() + 1;
        std::thread::scope(|scope| drop(scope.spawn(move || Self::warm_lanes(count)).join()));
    }

    fn warm_lanes(count: usize) {
        // All threads exist at the same time.
        let gate = Mutex::new(());
        std::thread::scope(|scope| {
            let _closed = gate.lock();
            for _ in 0..count {
                // A thread that cannot be started now may be startable later.
                drop(lane_thread().spawn_scoped(scope, || drop(gate.lock())));
            }
        });
    }

    /// Releases the resources in a device's primary context, which is about to be reset. [`Engine::prepare`] makes them anew.
    pub(crate) fn release(&mut self, driver: &Driver, device: usize) {
        for lane in &mut self.lanes {
            if let Some(way) = lane.ways.get_mut(device).and_then(Option::take) {
                // SAFETY: the event is ours, and nobody waits for it.
                unsafe { (driver.cuEventDestroy_v2)(way.done) };
            }
        }
        if device == 0 {
            self.buffers.unregister(driver);
        }
        if let Some(stream) = self.streams.get_mut(device).and_then(Option::take) {
            // SAFETY: the stream is ours and idle.
            unsafe { (driver.cuStreamDestroy_v2)(stream) };
        }
    }

    /// Called when a device's primary context was reset while the engine was away: its resources there went with the context.
    pub(crate) fn forget(&mut self, device: usize) {
        for way in self.lanes.iter_mut().filter_map(|lane| lane.ways.get_mut(device)) {
            *way = None;
        }
        if let Some(stream) = self.streams.get_mut(device) {
            *stream = None;
        }
    }

    /// Whether the engine has no stream and no event in a device's primary context.
    #[cfg(test)]
    pub(crate) fn has_nothing_of(&self, device: usize) -> bool {
        self.streams[device].is_none() && self.lanes.iter().all(|lane| lane.ways[device].is_none())
    }

    /// Copies jobs' memory into the data file, until no job is left. Commands that wait for a job are also told of a failure.
    pub(crate) fn copy_out(
        &mut self,
        driver: &Driver,
        copying: &Copying,
        writer: &DataWriter,
    ) -> Result<(), EngineError> {
        let lanes = self.lanes.len().min(copying.tasks.len());
        let (stage, pace) = (self.stage.clone(), self.pace.clone());
        let out = Out::new(driver, copying, writer, &stage, &pace, self.few);
        let _under_way = pace.begin();
        let copied = self.run(lanes, lanes, |lane, number| out.copy(lane, number));
        let (times, long) = pace.gave_way();
        debug!(times, ms = long.as_millis() as u64, "lanes have given way to the application");
        copied.and(out.end())
    }

    /// Runs `count` jobs over so many lanes at most, each lane in a thread; the first error ends all of them.
    fn run(
        &mut self,
        lanes: usize,
        count: usize,
        job: impl Fn(&mut Lane, usize) -> Result<(), EngineError> + Sync,
    ) -> Result<(), EngineError> {
        let next = AtomicUsize::new(0);
        let failed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .lanes
                .iter_mut()
                .take(lanes.min(count).max(1))
                .filter_map(|lane| {
                    let (next, failed, job) = (&next, &failed, &job);
                    let work = move || {
                        look_often();
                        loop {
                            let i = next.fetch_add(1, Relaxed);
                            if i >= count || failed.load(Relaxed) {
                                return Ok(());
                            }
                            job(lane, i).inspect_err(|_| failed.store(true, Relaxed))?;
                        }
                    };
                    lane_thread().spawn_scoped(scope, work).ok()
                })
                .collect();
            let mut result = if threads.is_empty() && count > 0 { Err(EngineError::NoThread) } else { Ok(()) };
            for thread in threads {
                result = result.and(thread.join().unwrap_or(Err(EngineError::Lost)));
            }
            result
        })
    }
}

/// A thread with a stack of the size that lanes have: the deepest calls are those of a compressor or the driver.
pub(crate) fn small_thread(name: &str) -> Thread {
    Thread::named(name).stack_size(LANE_STACK)
}

fn lane_thread() -> Thread {
    small_thread("lane")
}

/// Has the kernel wake this thread when it asks to be woken, rather than up to 50 us later.
fn look_often() {
    // SAFETY: no pointers; a failure changes nothing.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000 as libc::c_ulong, 0, 0, 0) };
}

#[cfg(test)]
mod tests;

//! Measures how fast the engine copies device memory to the host, compared with the link: `rekindle-bench link`, which
//! `scripts/bench link` calls. No worker and no daemon are involved; the copies are hashed and discarded.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rekindle_images::content::ContentKey;
use rekindle_images::{DataWriter, PIECE_LENGTH};
use rekindle_wire::window;
use serde::Serialize;
use thiserror::Error;

use super::*;
use crate::checkpoint::copying::{Place, Preservation, Task};
use crate::gpu::driver::{self, LoadError};
use crate::resources::job::{EngineError, jobs};
use crate::resources::memory::DeviceMemory;
use rekindle_images::ImageError;

const NO_FLAGS: u32 = 0;
/// The buffer with which the link is measured.
const BUFFER: u64 = 256 << 20;
const UNIT: u64 = 64 << 20;

/// One size's figures: GB/s, one for each repeat.
#[derive(Debug, Default, Serialize)]
struct Figures {
    bytes: u64,
    /// One stream copies into one pinned buffer, again and again.
    link: Vec<f64>,
    /// The same, in pieces like those of an image.
    link_by_pieces: Vec<f64>,
    /// The engine, until all memory is off the device, with a stage that has room for all; and until all is hashed too.
    staged: Vec<f64>,
    staged_to_end: Vec<f64>,
    /// The engine without a stage.
    unstaged: Vec<f64>,
    /// Registering host memory with the driver, which the stage is not, in GB/s; and one stream that copies to all of it.
    register: Vec<f64>,
    link_to_registered: Vec<f64>,
}

/// Reasons why a measurement fails.
#[derive(Debug, Error)]
pub(crate) enum BenchError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Driver(#[from] CallFailed),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Stage(#[from] StageError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("no host memory: {0}")]
    NoMemory(std::io::Error),
    #[error("{}: {source}", .dir.display())]
    Write { dir: PathBuf, source: std::io::Error },
    #[error("no size to measure")]
    NoSize,
    #[error("a size of nothing")]
    Nothing,
    #[error("no table")]
    NoTable,
    #[error("no stream")]
    NoStream,
    #[error("more pieces than are hashed at a time")]
    TooMany,
    #[error("the watch failed")]
    Watch,
    #[error("the device's hashes are not the host's")]
    Hashes,
    #[error("what was copied and hashed is not what was there")]
    Content,
}

#[derive(Debug, Serialize)]
struct Report {
    lanes: usize,
    figures: Vec<Figures>,
}

/// Measures each size in bytes and prints JSON.
///
/// # Errors
/// A resource is not available, or a copy failed.
pub(crate) fn bench(library: &Path, sizes: &[u64], repeats: usize) -> Result<(), BenchError> {
    let driver = driver::load(library)?;
    let largest = sizes.iter().copied().max().filter(|_| !sizes.contains(&0)).ok_or(BenchError::NoSize)?;
    let mut bench = Bench::new(&driver, largest)?;
    let stage = bench.engine.stage.clone();
    let units: Vec<u64> = (1..=largest.div_ceil(UNIT)).collect();
    let make = |number: &u64| super::unit::written_memfd(c"bench", UNIT).map(|file| (*number, file));
    let files = units.iter().map(make).collect::<Result<_, _>>().map_err(BenchError::NoMemory)?;
    stage.set(UNIT, &units, files)?;
    let mut figures = Vec::new();
    for &bytes in sizes {
        let mut of_size = Figures { bytes, ..Figures::default() };
        for _ in 0..repeats {
            let rate = |time: Duration| bytes as f64 / time.as_secs_f64().max(1e-9) / 1e9;
            of_size.link.push(rate(bench.link(bytes, BUFFER)?));
            of_size.link_by_pieces.push(rate(bench.link(bytes, PIECE_LENGTH)?));
            bench.engine.stage = stage.clone();
            let (off, end) = bench.copy(bytes)?;
            of_size.staged.push(rate(off));
            of_size.staged_to_end.push(rate(end));
            bench.engine.stage = Stage::default();
            of_size.unstaged.push(rate(bench.copy(bytes)?.0));
            let (registered, copied) = bench.registered(&stage, bytes)?;
            of_size.register.push(rate(registered));
            of_size.link_to_registered.push(rate(copied));
        }
        figures.push(of_size);
    }
    let report = Report { lanes: bench.engine.lanes.len(), figures };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

struct Bench<'a> {
    driver: &'a Driver,
    primary: CUcontext,
    stream: CUstream,
    source: u64,
    buffer: *mut u8,
    engine: Engine,
}

impl<'a> Bench<'a> {
    fn new(driver: &'a Driver, largest: u64) -> Result<Self, CallFailed> {
        let (mut device, mut primary, mut stream, mut buffer) = (0, 0, 0, std::ptr::null_mut());
        // SAFETY: out parameters are locals.
        unsafe {
            checked("cuInit", (driver.cuInit)(0))?;
            checked("cuDeviceGet", (driver.cuDeviceGet)(&raw mut device, 0))?;
            checked("cuDevicePrimaryCtxRetain", (driver.cuDevicePrimaryCtxRetain)(&raw mut primary, device))?;
            checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(primary))?;
            checked("cuStreamCreate", (driver.cuStreamCreate)(&raw mut stream, NO_FLAGS))?;
            let allocated = (driver.cuMemHostAlloc)(&raw mut buffer, BUFFER as usize, NO_FLAGS);
            checked("cuMemHostAlloc", allocated)?;
        }
        // Allocated like a client's memory.
        let mut memory = DeviceMemory::new(device, 0, window::MAX_PIECE);
        memory.client_reserves(window::device(0).end);
        let source = memory.allocate(driver, largest, 0);
        let source = source.map_err(|e| CallFailed { call: "an allocation", code: e.code() })?;
        // Zeros would not be written, which would falsify the measurement.
        // SAFETY: the allocation holds that much, and lives to the end.
        unsafe {
            let set = (driver.cuMemsetD8Async)(source, 0x5a, largest as usize, stream);
            checked("cuMemsetD8Async", set)?;
            checked("cuStreamSynchronize", (driver.cuStreamSynchronize)(stream))?;
        }
        let mut engine = Engine::new();
        engine.prepare(driver, &[primary])?;
        engine.warm_up();
        Ok(Self { driver, primary, stream, source, buffer: buffer.cast(), engine })
    }

    /// How long one stream takes for all bytes, `at_a_time` bytes per copy.
    fn link(&self, bytes: u64, at_a_time: u64) -> Result<Duration, CallFailed> {
        let driver = self.driver;
        // SAFETY: the context is the driver's own.
        checked("cuCtxSetCurrent", unsafe { (driver.cuCtxSetCurrent)(self.primary) })?;
        let began = Instant::now();
        for offset in (0..bytes).step_by(at_a_time as usize) {
            let length = at_a_time.min(bytes - offset).min(BUFFER) as usize;
            // SAFETY: the allocation has these bytes, the buffer room for them; what overwrites what does not matter.
            unsafe {
                let from = self.source + offset;
                let copied = (driver.cuMemcpyDtoHAsync_v2)(self.buffer.cast(), from, length, self.stream);
                checked("cuMemcpyDtoHAsync", copied)?;
            }
        }
        // SAFETY: the stream is ours.
        checked("cuStreamSynchronize", unsafe { (driver.cuStreamSynchronize)(self.stream) })?;
        Ok(began.elapsed())
    }

    /// How long registering this much of the stage takes, and then copying to it.
    fn registered(&self, stage: &Stage, bytes: u64) -> Result<(Duration, Duration), CallFailed> {
        let driver = self.driver;
        // SAFETY: the context is the driver's own.
        checked("cuCtxSetCurrent", unsafe { (driver.cuCtxSetCurrent)(self.primary) })?;
        let pieces = jobs(self.source, bytes, 0, self.primary);
        let slots: Vec<_> = pieces.filter_map(|job| Some((job, stage.take()?))).collect();
        let began = Instant::now();
        for (_, slot) in &slots {
            // SAFETY: the slot stays mapped until it is unregistered.
            let done = unsafe { (driver.cuMemHostRegister_v2)(slot.place().cast(), PIECE_LENGTH as usize, NO_FLAGS) };
            checked("cuMemHostRegister", done)?;
        }
        let (registered, began) = (began.elapsed(), Instant::now());
        for (job, slot) in &slots {
            // SAFETY: the slot has room for a piece, and lives until the copies are done.
            unsafe { job.read(driver, slot.place(), self.stream)? };
        }
        // SAFETY: the stream is ours.
        checked("cuStreamSynchronize", unsafe { (driver.cuStreamSynchronize)(self.stream) })?;
        let copied = began.elapsed();
        for (_, slot) in &slots {
            // SAFETY: registered above, and nothing copies there any more.
            let done = unsafe { (driver.cuMemHostUnregister)(slot.place().cast()) };
            checked("cuMemHostUnregister", done)?;
        }
        Ok((registered, copied))
    }

    /// How long the engine takes until all bytes are off the device, and until all are hashed and discarded.
    fn copy(&mut self, bytes: u64) -> Result<(Duration, Duration), BenchError> {
        let nowhere = std::fs::File::options().write(true).open("/dev/null")?;
        let key = ContentKey::random()?;
        let writer = DataWriter::new(nowhere, 0, key)?;
        let place = Place::Allocation(self.source);
        let task = |job| Task { job, place, preservation: Preservation::Closed, expected: None, before: None, soon: 0 };
        let copying = Copying::new(jobs(self.source, bytes, 0, self.primary).map(task).collect(), None, false);
        let began = Instant::now();
        let off = std::thread::scope(|scope| {
            let watching = scope.spawn(|| {
                while !copying.may_open() && !copying.has_failed() {
                    std::thread::sleep(Duration::from_micros(20));
                }
                began.elapsed()
            });
            let copied = self.engine.copy_out(self.driver, &copying, &writer);
            let watched = watching.join().map_err(|_| BenchError::Watch);
            copied.map_err(BenchError::from).and(watched)
        })?;
        Ok((off, began.elapsed()))
    }
}

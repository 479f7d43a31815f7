//! The copy engine: moves pieces between the device and the image's data files, several at a time.
//!
//! ```text
//!   save   device ──copy──> lane's pinned buffer ──> stage ──> a writer: hash, as expected? write ──> data file
//!                                   └── no room there: the lane is the writer ──────────────────────────┘
//!   load   data file ──read, compare hash──> lane's pinned buffer ──copy──> device
//! ```
//!
//! Each lane is a thread with a pinned buffer and a stream of its own on each device, made before there is a client:
//! the engine never allocates or uses the legacy stream while it copies. A piece is off the device, so that its memory may
//! be written, as soon as it is in the lane's buffer: with room on the [`stage`] that happens at the pace of
//! the link, else at the pace of the files. A lane that has nothing left to copy writes too. Before each piece a lane looks
//! whether it may go on (see [`pace`]).

pub(crate) mod bench;
mod pace;
pub(crate) mod sinks;
mod stage;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use rekindle_cuda_abi::types::*;
use rekindle_images::{DataReader, DataWriter, ImageError, PIECE_LENGTH, Piece};
use rekindle_wire::control::WRONG_GUESS;
use thiserror::Error;
use tracing::debug;

pub(crate) use self::pace::{Pace, Transfer};
pub(crate) use self::stage::Stage;
use self::stage::{Queue, Slot};
use super::boxes::ArrayPart;
use super::copying::{Copying, Taken};
use super::driver::{CallFailed, Driver, expect};

/// Why a copy was not finished.
#[derive(Debug, Error)]
pub(crate) enum EngineError {
    #[error(transparent)]
    Driver(#[from] CallFailed),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("it was cancelled")]
    Cancelled,
    /// A job's memory is not as it was at the quiesce.
    #[error("{WRONG_GUESS}: {length} bytes at {address:#x} were written while they were copied")]
    WrongGuess { address: u64, length: u64 },
    #[error("a copying thread failed")]
    Lost,
}

/// One piece of device memory to copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    /// Its first byte on the device.
    pub(crate) address: u64,
    /// Its place in its region.
    pub(crate) offset: u64,
    /// At most [`PIECE_LENGTH`] when saving.
    pub(crate) length: u64,
    /// The worker's number of the device.
    pub(crate) device: usize,
    /// The driver's context to copy in.
    pub(crate) context: CUcontext,
    /// Of an array: the part, which has no address.
    pub(crate) array: Option<ArrayPart>,
}

impl Job {
    /// Copies the piece to the host, in stream order.
    ///
    /// # Safety
    /// The device has the piece, and `host` room for it until the copy is done.
    unsafe fn read(&self, driver: &Driver, host: *mut u8, stream: CUstream) -> Result<(), CallFailed> {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(array) = &self.array {
                let copy = array.copy(host, true);
                return expect("cuMemcpy3DAsync", (driver.cuMemcpy3DAsync_v2)(&raw const copy, stream));
            }
            let copied = (driver.cuMemcpyDtoHAsync_v2)(host.cast(), self.address, self.length as usize, stream);
            expect("cuMemcpyDtoHAsync", copied)
        }
    }

    /// Copies content from the host to the piece's place, in stream order.
    ///
    /// # Safety
    /// The device has room for the piece, and the content lives until the copy is done.
    unsafe fn write(&self, driver: &Driver, content: &[u8], stream: CUstream) -> Result<(), CallFailed> {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(array) = &self.array {
                let copy = array.copy(content.as_ptr().cast_mut(), false);
                return expect("cuMemcpy3DAsync", (driver.cuMemcpy3DAsync_v2)(&raw const copy, stream));
            }
            let copied = (driver.cuMemcpyHtoDAsync_v2)(self.address, content.as_ptr().cast(), content.len(), stream);
            expect("cuMemcpyHtoDAsync", copied)
        }
    }
}

/// Cuts a region into jobs.
pub(crate) fn jobs(address: u64, size: u64, device: usize, context: CUcontext) -> impl Iterator<Item = Job> {
    (0..size.div_ceil(PIECE_LENGTH)).map(move |i| {
        let offset = i * PIECE_LENGTH;
        Job { address: address + offset, offset, length: PIECE_LENGTH.min(size - offset), device, context, array: None }
    })
}

/// What a lane has on each device: the primary context, and a stream in it.
type Streams = Vec<Option<(CUcontext, CUstream)>>;

struct Lane {
    buffer: *mut u8,
    streams: Streams,
}

// SAFETY: the buffer is this lane's alone, and a lane is used by one thread at a time.
unsafe impl Send for Lane {}

/// What a writer needs: the deepest that it goes is a compressor.
const WRITER_STACK: usize = 512 << 10;

/// A piece on the stage.
type Staged = (Taken, Slot);

/// All lanes.
pub(crate) struct Engine {
    lanes: Vec<Lane>,
    count: usize,
    /// Host memory that pieces may wait in.
    pub(crate) stage: Stage,
    /// How fast copies out of devices may be.
    pub(crate) pace: Pace,
}

impl Engine {
    /// An engine with as many lanes as copying is worth threads on this machine.
    pub(crate) fn new() -> Self {
        let count = (super::cores() / 2).clamp(1, 8);
        Self { lanes: Vec::new(), count, stage: Stage::default(), pace: Pace::default() }
    }

    /// Makes what is missing of buffers and streams. `primaries` are the devices' primary contexts.
    pub(crate) fn prepare(&mut self, driver: &Driver, primaries: &[CUcontext]) -> Result<(), CallFailed> {
        const PORTABLE: u32 = 1;
        const NON_BLOCKING: u32 = 1;
        let Some(&first) = primaries.first() else { return Ok(()) };
        while self.lanes.len() < self.count {
            self.lanes.push(Lane { buffer: std::ptr::null_mut(), streams: vec![None; primaries.len()] });
        }
        for lane in &mut self.lanes {
            if lane.buffer.is_null() {
                let mut buffer = std::ptr::null_mut();
                // SAFETY: out parameters are locals; the context is the driver's own.
                unsafe {
                    expect("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(first))?;
                    let allocated = (driver.cuMemHostAlloc)(&raw mut buffer, PIECE_LENGTH as usize, PORTABLE);
                    expect("cuMemHostAlloc", allocated)?;
                }
                lane.buffer = buffer.cast();
            }
            for (slot, &primary) in lane.streams.iter_mut().zip(primaries) {
                if slot.is_none() {
                    let mut stream = 0;
                    // SAFETY: as above.
                    unsafe {
                        expect("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(primary))?;
                        expect("cuStreamCreate", (driver.cuStreamCreate)(&raw mut stream, NON_BLOCKING))?;
                    }
                    *slot = Some((primary, stream));
                }
            }
        }
        Ok(())
    }

    /// Runs every lane's and writer's thread once, so that their stacks are mapped before there is a client, see
    /// [`super::start`].
    pub(crate) fn warm_up(&mut self) {
        let count = self.lanes.len();
        // And the thread's that starts them while a client runs on.
        std::thread::scope(|scope| drop(scope.spawn(|| self.warm_lanes(count)).join()));
    }

    fn warm_lanes(&mut self, count: usize) {
        let all_here = std::sync::Barrier::new(2 * count);
        let meet = || {
            all_here.wait();
            Ok(())
        };
        let started = with_writers(count, &meet, || self.run(count, &AtomicBool::new(false), |_, _| meet()));
        debug_assert!(started.is_ok());
    }

    /// Gives back what lies in a device's primary context, which is about to be reset. [`Engine::prepare`] makes it
    /// anew.
    pub(crate) fn release(&mut self, driver: &Driver, device: usize) {
        for lane in &mut self.lanes {
            if let Some((_, stream)) = lane.streams.get_mut(device).and_then(Option::take) {
                // SAFETY: the stream is ours and idle.
                unsafe { (driver.cuStreamDestroy_v2)(stream) };
            }
            if device == 0 && !lane.buffer.is_null() {
                // SAFETY: the buffer is ours and no copy uses it.
                unsafe { (driver.cuMemFreeHost)(lane.buffer.cast()) };
                lane.buffer = std::ptr::null_mut();
            }
        }
    }

    /// Copies jobs' memory into the data file, until there is none left to take. Whoever waits for a job hears of a
    /// failure too.
    pub(crate) fn copy_out(
        &mut self,
        driver: &Driver,
        copying: &Copying,
        writer: &DataWriter,
    ) -> Result<(), EngineError> {
        let lanes = self.lanes.len().min(copying.tasks.len());
        let (stage, pace, queue) = (self.stage.clone(), self.pace.clone(), Queue::default());
        let _under_way = pace.begin();
        let settle = |(taken, mut slot): Staged| match copying.has_failed() {
            true => Ok(()),
            false => write_out(copying, &taken, &slot.bytes()[..taken.job.length as usize], writer),
        };
        let write_staged = || std::iter::from_fn(|| queue.pop()).try_for_each(settle).inspect_err(|_| copying.fail());
        let copy = |lane: &mut Lane| {
            loop {
                // Before it takes a job: that may be cloned meanwhile, and what a command waits for is the first to go.
                let turn = copying
                    .next_device()
                    .filter(|device| pace.wait(*device, PIECE_LENGTH, || copying.next_device().is_none()));
                let taken = copying.take();
                let took = taken.map(|it| (it.job.device, it.job.length));
                pace.correct(turn.map(|device| (device, PIECE_LENGTH)), took);
                let Some(taken) = taken else { break };
                // While a command waits nobody looks whether transfers are done.
                if !taken.urgent {
                    pace.give_way(taken.job.device, || copying.has_failed());
                }
                let content = read_in(driver, lane, copying, &taken)?;
                match stage.take() {
                    Some(mut slot) => {
                        slot.bytes()[..content.len()].copy_from_slice(content);
                        queue.push((taken, slot));
                    }
                    None => write_out(copying, &taken, content, writer)?,
                }
            }
            std::iter::from_fn(|| queue.pop_now()).try_for_each(settle)
        };
        with_writers(if stage.is_empty() { 0 } else { lanes }, &write_staged, || {
            let copied = self.run(lanes, &AtomicBool::new(false), |lane, _| copy(lane).inspect_err(|_| copying.fail()));
            queue.close();
            copied
        })?;
        let (times, long) = pace.gave_way();
        debug!(times, ms = long.as_millis() as u64, "lanes have given way to the application");
        match copying.wrong() {
            Some((address, length)) => Err(EngineError::WrongGuess { address, length }),
            None if copying.has_failed() => Err(EngineError::Cancelled),
            None => Ok(()),
        }
    }

    /// Fills device memory from data files.
    pub(crate) fn load(
        &mut self,
        driver: &Driver,
        jobs: &[(Job, Piece)],
        reader: &DataReader,
        cancel: &AtomicBool,
    ) -> Result<(), EngineError> {
        self.run(jobs.len(), cancel, |lane, i| {
            let (job, piece) = &jobs[i];
            let stream = enter(driver, lane, job)?;
            // A piece may be longer than a lane's buffer: other versions may cut larger ones.
            let mut large = Vec::new();
            let length = piece.length as usize;
            let content = if length <= PIECE_LENGTH as usize {
                // SAFETY: the buffer holds PIECE_LENGTH bytes, and is this lane's alone.
                unsafe { std::slice::from_raw_parts_mut(lane.buffer, length) }
            } else {
                large.resize(length, 0);
                &mut large[..]
            };
            reader.read(piece, content)?;
            // SAFETY: the device range was allocated for this region; the content lives until the copy is done.
            unsafe {
                job.write(driver, content, stream)?;
                expect("cuStreamSynchronize", (driver.cuStreamSynchronize)(stream))?;
            }
            Ok(())
        })
    }

    /// Runs `count` jobs over the lanes, each lane in a thread; the first error ends all of them.
    fn run(
        &mut self,
        count: usize,
        cancel: &AtomicBool,
        job: impl Fn(&mut Lane, usize) -> Result<(), EngineError> + Sync,
    ) -> Result<(), EngineError> {
        let next = AtomicUsize::new(0);
        let failed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .lanes
                .iter_mut()
                .take(count.max(1))
                .map(|lane| {
                    let (next, failed, job) = (&next, &failed, &job);
                    scope.spawn(move || {
                        loop {
                            let i = next.fetch_add(1, Relaxed);
                            if i >= count || failed.load(Relaxed) {
                                return Ok(());
                            }
                            if cancel.load(Relaxed) {
                                return Err(EngineError::Cancelled);
                            }
                            job(lane, i).inspect_err(|_| failed.store(true, Relaxed))?;
                        }
                    })
                })
                .collect();
            let mut result = Ok(());
            for thread in threads {
                result = result.and(thread.join().unwrap_or(Err(EngineError::Lost)));
            }
            result
        })
    }
}

/// Runs `body` beside so many threads that each run `write`. A thread that cannot be had is done without.
fn with_writers(
    count: usize,
    write: &(impl Fn() -> Result<(), EngineError> + Sync),
    body: impl FnOnce() -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    std::thread::scope(|scope| {
        let thread = || std::thread::Builder::new().name("write".into()).stack_size(WRITER_STACK);
        let writers: Vec<_> = (0..count).filter_map(|_| thread().spawn_scoped(scope, write).ok()).collect();
        let result = body();
        let written = writers.into_iter().map(|writer| writer.join().unwrap_or(Err(EngineError::Lost)));
        // All are waited for.
        written.fold(result, Result::and)
    })
}

/// Copies a job's memory into the lane's buffer. It may be written from then on.
fn read_in<'a>(driver: &Driver, lane: &'a mut Lane, copying: &Copying, taken: &Taken) -> Result<&'a [u8], EngineError> {
    let job = taken.job;
    let read = enter(driver, lane, &job).and_then(|stream| {
        // SAFETY: the buffer holds a piece, and jobs are no longer than one; the device range is the client's, or a clone.
        unsafe {
            job.read(driver, lane.buffer, stream)?;
            expect("cuStreamSynchronize", (driver.cuStreamSynchronize)(stream))
        }
    });
    if let Err(failed) = read {
        // Nothing is being read any more, nor will be: who waits for that goes on.
        copying.fail();
        copying.is_not_read(taken);
        return Err(failed.into());
    }
    copying.is_read(taken);
    // SAFETY: the piece lies there now; the lane is borrowed as long as the content is.
    Ok(unsafe { std::slice::from_raw_parts(lane.buffer, job.length as usize) })
}

/// Puts a job's content into the data file, if it is what it was at the quiesce.
fn write_out(copying: &Copying, taken: &Taken, content: &[u8], writer: &DataWriter) -> Result<(), EngineError> {
    let hash = writer.hash(content);
    let task = &copying.tasks[taken.index];
    if task.expected.is_some_and(|expected| expected != hash) {
        copying.is_wrong(taken);
        return Ok(());
    }
    if copying.is_in_vain() {
        copying.is_passed(taken);
        return Ok(());
    }
    let piece = match &task.before {
        Some(before) if before.hash == hash => *before,
        Some(before) => writer.replace_hashed(before, content, hash)?,
        None => writer.append_hashed(taken.job.offset, content, hash)?,
    };
    copying.is_written(taken, piece);
    Ok(())
}

/// Makes a job's context current in this thread, and says which stream to copy in.
fn enter(driver: &Driver, lane: &Lane, job: &Job) -> Result<CUstream, CallFailed> {
    // SAFETY: the context is the driver's own.
    expect("cuCtxSetCurrent", unsafe { (driver.cuCtxSetCurrent)(job.context) })?;
    Ok(match lane.streams.get(job.device) {
        Some(Some((primary, stream))) if *primary == job.context => *stream,
        // A context of the client's own making: the thread's default stream in it.
        _ => CU_STREAM_PER_THREAD,
    })
}

#[cfg(test)]
mod tests;

//! How lanes load: device memory is filled from data files.
//!
//! ```text
//!   zeros are set, and what a template has is copied: by the device, no byte crosses the link
//!   take a piece ──> read into one of the lane's two buffers ──> copy to the device ──(later)─> compare the hash
//!                                      └── the other one is being copied meanwhile
//! ```
//!
//! From a tmpfs of huge pages 16 lanes with two buffers of 4 MiB bring 96 % of what the link takes. With buffers of 2 MiB they bring
//! 92 %, with one buffer 84 % (`tests/facts/feeding.cu`). All lanes work: nothing of the application runs on the device before its
//! memory is there.
//!
//! [`crate::checkpoint::template`] says what a template is.
//!
//! The device hashes faster than lanes read, so hashes are compared there, when all content has arrived
//! (`checkpoint/background_load.rs`). A lane compares the hash of what the device cannot hash: arrays, memory of other contexts
//! than the primary ones, and pieces of images that were hashed otherwise.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rekindle_images::{DataReader, PIECE_LENGTH, Piece, Storage};
use rekindle_wire::window;

use super::Engine;
use super::lane::{Lane, Way, enter, wait};
use crate::gpu::driver::{CallFailed, Driver, checked};
use crate::resources::job::{EngineError, Job};

/// A piece of content, and its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) job: Job,
    pub(crate) piece: Piece,
    /// Whether the hash is compared on the device.
    pub(crate) on_device: bool,
    /// Whether the memory has the content, since it is a template's.
    is_there: bool,
    /// Where a template has the content.
    from: Option<u64>,
}

impl Part {
    /// Whether the part is set, and not copied.
    fn is_set(&self) -> bool {
        matches!(self.piece.storage, Storage::Zero) && self.job.array.is_none()
    }

    /// Whether the lane need not wait for the copy: it fits into a buffer, and the device compares the hash.
    fn fits(&self) -> bool {
        self.on_device && self.piece.length <= PIECE_LENGTH
    }
}

/// A range of device memory that the device fills by itself.
struct Run {
    to: u64,
    /// Where a template has the content; none if it is zeros.
    from: Option<u64>,
    length: u64,
    /// Whether a region begins with it.
    begins: bool,
    way: Way,
}

impl Run {
    /// Extends the range by one that follows it, also in the template. Returns whether it does.
    fn take_in(&mut self, next: &Self) -> bool {
        let is_behind = self.to + self.length == next.to && self.from.map(|from| from + self.length) == next.from;
        // Mappings of several devices may lie side by side.
        let follows = is_behind && self.way.primary == next.way.primary && may_be_one(next.to, next.begins);
        if follows {
            self.length += next.length;
        }
        follows
    }

    /// Has the device fill the range, in the order of the device's stream.
    fn enqueue(&self, driver: &Driver) -> Result<(), CallFailed> {
        let Self { to, from, length, way, .. } = *self;
        // SAFETY: the context is the driver's own; the ranges are mapped, and nobody else uses them.
        unsafe {
            checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(way.primary))?;
            match from {
                Some(from) => checked("cuMemcpyAsync", (driver.cuMemcpyAsync)(to, from, length as usize, way.stream)),
                None => checked("cuMemsetD8Async", (driver.cuMemsetD8Async)(to, 0, length as usize, way.stream)),
            }
        }
    }
}

/// Whether a range may be filled together with what lies before it. The driver takes a range of several mappings of Rekindle's, and none
/// that reaches from one variable of a module into the next (`CUDA_ERROR_INVALID_VALUE`).
fn may_be_one(address: u64, begins: bool) -> bool {
    !begins || window::device_of(address).is_some()
}

/// The content to load, and how far the load is. The executor looks at it while lanes work.
#[derive(Debug, Default)]
pub(crate) struct Fill {
    parts: Vec<Part>,
    bytes: u64,
    loaded: AtomicU64,
    set: AtomicU64,
    copied: AtomicU64,
}

impl Fill {
    /// A load of these pieces. Pieces that are stored go in the order of the files, those of zeros last. `can_hash` tells whether
    /// the device can hash a job's memory under the image's key.
    pub(crate) fn new(mut pieces: Vec<(Job, Piece)>, can_hash: impl Fn(&Job) -> bool) -> Self {
        let place = |piece: &Piece| piece.storage.place().map(|(file, extent)| (file, extent.offset));
        pieces.sort_by_key(|(_, piece)| place(piece).map_or((true, None), |place| (false, Some(place))));
        let parts = pieces.into_iter().map(|(job, piece)| {
            let stored = place(&piece).is_some();
            Part { job, piece, on_device: stored && can_hash(&job), is_there: false, from: None }
        });
        let parts: Vec<_> = parts.collect();
        Self { bytes: parts.iter().map(|it| it.job.length).sum(), parts, ..Self::default() }
    }

    /// Takes out the parts of these jobs, to be loaded by themselves.
    pub(crate) fn split_off(&mut self, of: impl Fn(&Job) -> bool) -> Self {
        let (later, now): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.parts).into_iter().partition(|part| of(&part.job));
        let bytes = |parts: &[Part]| parts.iter().map(|it| it.job.length).sum();
        (self.bytes, self.parts) = (bytes(&now), now);
        Self { bytes: bytes(&later), parts: later, ..Self::default() }
    }

    /// Leaves the parts out whose memory has the content. Their hashes are compared all the same.
    pub(crate) fn is_there(&mut self, of: impl Fn(&Job) -> bool) {
        self.parts.iter_mut().for_each(|part| part.is_there = of(&part.job));
    }

    /// Has parts copied on the device, whose content lies where this says.
    pub(crate) fn copy_from(&mut self, of: impl Fn(&Part) -> Option<u64>) {
        let on_device = self.parts.iter_mut().filter(|part| part.on_device);
        on_device.for_each(|part| part.from = of(part));
    }

    /// The parts whose hashes the device must compare.
    pub(crate) fn to_compare(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().filter(|it| it.on_device)
    }

    /// Bytes to load in all.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes loaded so far.
    pub(crate) fn loaded(&self) -> u64 {
        self.loaded.load(Relaxed)
    }

    /// Bytes among them that were set, since they are zeros.
    pub(crate) fn set(&self) -> u64 {
        self.set.load(Relaxed)
    }

    /// Bytes among them that were copied from a template.
    pub(crate) fn copied(&self) -> u64 {
        self.copied.load(Relaxed)
    }
}

impl Engine {
    /// Fills device memory from data files. Does not compare hashes of parts that the device must compare.
    ///
    /// # Errors
    /// The first error of any lane. Memory holds anything then.
    pub(crate) fn load(&mut self, driver: &Driver, fill: &Fill, reader: &DataReader) -> Result<(), EngineError> {
        let left = self.begin_on_device(driver, fill)?;
        let made = self.lanes.iter_mut().take(self.loading).try_for_each(|lane| lane.make_events(driver));
        let loaded = made.map_err(EngineError::from).and_then(|()| {
            self.run(self.loading, left.len(), |lane, i| {
                let part = left[i];
                if part.is_set() {
                    // In a context that the client created.
                    let way = enter(driver, lane, &part.job)?;
                    // SAFETY: the device range was allocated for this part.
                    unsafe { part.job.set_zero(driver, way.stream)? };
                    wait(driver, way)?;
                    fill.set.fetch_add(part.job.length, Relaxed);
                } else if part.fits() && lane.has_events(part.job.device) {
                    load_by_turns(driver, lane, part, reader)?;
                } else {
                    load_whole(driver, lane, part, reader)?;
                }
                fill.loaded.fetch_add(part.job.length, Relaxed);
                Ok(())
            })
        });
        // Also after an error: what is under way reads the buffers.
        let synchronized = self.synchronize(driver);
        self.lanes.iter_mut().for_each(|lane| lane.remove_events(driver));
        loaded.and(synchronized.map_err(EngineError::from))
    }

    /// Enqueues what needs no byte of a file: sets zeros, and copies what a template has. Returns the other parts.
    fn begin_on_device<'fill>(&self, driver: &Driver, fill: &'fill Fill) -> Result<Vec<&'fill Part>, EngineError> {
        let mut runs: Vec<Run> = Vec::new();
        let mut left = Vec::new();
        for part in &fill.parts {
            if part.is_there {
                fill.loaded.fetch_add(part.job.length, Relaxed);
                continue;
            }
            let Job { address: to, length, device, context, offset, .. } = part.job;
            let way = self.lanes.first().and_then(|lane| lane.ways.get(device).copied().flatten());
            let way = way.filter(|way| way.primary == context);
            let from = if part.is_set() { Some(None) } else { part.from.map(Some) };
            match way.zip(from) {
                Some((way, from)) => runs.push(Run { to, from, length, begins: offset == 0, way }),
                None => left.push(part),
            }
        }
        runs.sort_unstable_by_key(|run| run.to);
        runs.dedup_by(|next, run| run.take_in(next));
        for run in runs {
            run.enqueue(driver)?;
            fill.loaded.fetch_add(run.length, Relaxed);
            let counter = if run.from.is_none() { &fill.set } else { &fill.copied };
            counter.fetch_add(run.length, Relaxed);
        }
        Ok(left)
    }

    /// Waits for all copies of all lanes.
    fn synchronize(&self, driver: &Driver) -> Result<(), CallFailed> {
        let synchronize = |way: &Way| {
            // SAFETY: context and stream are ours.
            unsafe {
                checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(way.primary))?;
                checked("cuStreamSynchronize", (driver.cuStreamSynchronize)(way.stream))
            }
        };
        let mut result = Ok(());
        for way in self.lanes.first().into_iter().flat_map(|lane| lane.ways.iter().flatten()) {
            // Each device is waited for, whatever has become of the others.
            result = result.and(synchronize(way));
        }
        result
    }
}

/// Reads the part into the buffer whose turn it is, while the other one is copied. The copy is under way afterwards.
fn load_by_turns(driver: &Driver, lane: &mut Lane, part: &Part, reader: &DataReader) -> Result<(), EngineError> {
    let Part { job, piece, .. } = part;
    let way = enter(driver, lane, job)?;
    let buffer = lane.take_turn(driver)?;
    // SAFETY: the buffer holds PIECE_LENGTH bytes, and is this lane's alone; no copy reads it any more.
    let content = unsafe { std::slice::from_raw_parts_mut(buffer, piece.length as usize) };
    reader.read_unchecked(piece, content)?;
    // SAFETY: the device range was allocated for this part; the buffer is not written until the copy is done.
    unsafe { job.write(driver, content, way.stream)? };
    Ok(lane.begun(driver, job.device)?)
}

/// Reads all of the part, and copies it. The copy is done afterwards.
fn load_whole(driver: &Driver, lane: &mut Lane, part: &Part, reader: &DataReader) -> Result<(), EngineError> {
    let Part { job, piece, on_device, .. } = part;
    let way = enter(driver, lane, job)?;
    lane.settle(driver)?;
    // A piece may be longer than a lane's buffer: other versions may make larger pieces.
    let mut large = Vec::new();
    let length = piece.length as usize;
    let content = if length <= PIECE_LENGTH as usize {
        // SAFETY: the buffer holds PIECE_LENGTH bytes, and is this lane's alone; no copy reads it any more.
        unsafe { std::slice::from_raw_parts_mut(lane.buffer, length) }
    } else {
        large.resize(length, 0);
        &mut large[..]
    };
    if *on_device {
        reader.read_unchecked(piece, content)?;
    } else {
        reader.read(piece, content)?;
    }
    // SAFETY: the device range was allocated for this part; the content lives until the copy is done.
    unsafe { job.write(driver, content, way.stream)? };
    Ok(wait(driver, way)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_of_mappings_are_one_range_and_those_of_variables_are_not() {
        let way = Way { primary: 1, stream: 2, done: 3 };
        let ranges = |at: u64, second_begins: bool| {
            let run = |to: u64, begins: bool| Run { to, from: None, length: 256, begins, way };
            let mut runs = vec![run(at, true), run(at + 256, second_begins)];
            runs.dedup_by(|next, run| run.take_in(next));
            runs.iter().map(|run| run.length).collect::<Vec<_>>()
        };
        const VARIABLES: u64 = 0x7ffd_c1a4_0000;
        assert_eq!(ranges(window::DEVICE_BASE, true), [512], "two allocations side by side");
        assert_eq!(ranges(VARIABLES, true), [256, 256], "two variables side by side");
        assert_eq!(ranges(VARIABLES, false), [512], "pieces of one variable");
    }
}

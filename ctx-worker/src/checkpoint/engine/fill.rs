//! How lanes load: device memory is filled from data files.
//!
//! ```text
//!   take a piece ──stored─> read into the lane's buffer ──> copy to the device, wait ──(later)─> compare the hash
//!                └─zeros──> set on the device: no byte crosses the link
//! ```
//!
//! All lanes work: nothing of the application runs on the device before its memory is there.
//!
//! The device hashes faster than lanes read, so hashes are compared there, when all content has arrived
//! (`checkpoint/background_load.rs`). A lane compares the hash of what the device cannot hash: arrays, memory of other contexts than the
//! primary ones, and pieces of images that were hashed otherwise.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rekindle_images::{DataReader, PIECE_LENGTH, Piece, Storage};

use super::Engine;
use super::lane::{Lane, enter, wait};
use crate::gpu::driver::Driver;
use crate::resources::job::{EngineError, Job};

/// A piece of content, and its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) job: Job,
    pub(crate) piece: Piece,
    /// Whether the hash is compared on the device.
    pub(crate) on_device: bool,
}

impl Part {
    /// Whether the part is set, and not copied.
    fn is_set(&self) -> bool {
        matches!(self.piece.storage, Storage::Zero) && self.job.array.is_none()
    }
}

/// The content to load, and how far the load is. The executor looks at it while lanes work.
#[derive(Debug, Default)]
pub(crate) struct Fill {
    parts: Vec<Part>,
    bytes: u64,
    loaded: AtomicU64,
    set: AtomicU64,
}

impl Fill {
    /// A load of these pieces. Pieces that are stored go in the order of the files, those of zeros last. `can_hash` tells whether
    /// the device can hash a job's memory under the image's key.
    pub(crate) fn new(mut pieces: Vec<(Job, Piece)>, can_hash: impl Fn(&Job) -> bool) -> Self {
        let place = |piece: &Piece| piece.storage.place().map(|(file, extent)| (file, extent.offset));
        pieces.sort_by_key(|(_, piece)| place(piece).map_or((true, None), |place| (false, Some(place))));
        let parts = pieces.into_iter().map(|(job, piece)| {
            let stored = place(&piece).is_some();
            Part { job, piece, on_device: stored && can_hash(&job) }
        });
        let parts: Vec<_> = parts.collect();
        Self { bytes: parts.iter().map(|it| it.job.length).sum(), parts, ..Self::default() }
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
}

impl Engine {
    /// Fills device memory from data files. Does not compare hashes of parts that the device must compare.
    ///
    /// # Errors
    /// The first error of any lane. Memory holds anything then.
    pub(crate) fn load(&mut self, driver: &Driver, fill: &Fill, reader: &DataReader) -> Result<(), EngineError> {
        self.run(fill.parts.len(), |lane, i| {
            let part = &fill.parts[i];
            if part.is_set() {
                let way = enter(driver, lane, &part.job)?;
                // SAFETY: the device range was allocated for this part.
                unsafe { part.job.set_zero(driver, way.stream)? };
                wait(driver, way)?;
                fill.set.fetch_add(part.job.length, Relaxed);
            } else {
                load_part(driver, lane, part, reader)?;
            }
            fill.loaded.fetch_add(part.job.length, Relaxed);
            Ok(())
        })
    }
}

fn load_part(driver: &Driver, lane: &Lane, part: &Part, reader: &DataReader) -> Result<(), EngineError> {
    let Part { job, piece, on_device } = part;
    let way = enter(driver, lane, job)?;
    // A piece may be longer than a lane's buffer: other versions may make larger pieces.
    let mut large = Vec::new();
    let length = piece.length as usize;
    let content = if length <= PIECE_LENGTH as usize {
        // SAFETY: the buffer holds PIECE_LENGTH bytes, and is this lane's alone.
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

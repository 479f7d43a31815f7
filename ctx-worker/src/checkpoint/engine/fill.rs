//! How lanes load: device memory is filled from data files.
//!
//! ```text
//!   take a piece ──stored─> read into the lane's buffer, compare the hash ──> copy to the device, wait
//!                └─zeros──> set on the device: no byte crosses the link
//! ```
//!
//! All lanes work: nothing of the application runs on the device before its memory is there.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rekindle_images::{DataReader, PIECE_LENGTH, Piece, Storage};

use super::Engine;
use super::lane::{Lane, enter, wait};
use crate::gpu::driver::Driver;
use crate::resources::job::{EngineError, Job};

/// The content to load, and how far the load is. The executor looks at it while lanes work.
#[derive(Debug, Default)]
pub(crate) struct Fill {
    pieces: Vec<(Job, Piece)>,
    bytes: u64,
    loaded: AtomicU64,
    set: AtomicU64,
}

impl Fill {
    /// A load of these pieces. Pieces that are stored go in the order of the files, those of zeros last.
    pub(crate) fn new(mut pieces: Vec<(Job, Piece)>) -> Self {
        pieces.sort_by_key(|(_, piece)| {
            piece.storage.place().map_or((true, None), |(file, at)| (false, Some((file, at.offset))))
        });
        Self { bytes: pieces.iter().map(|(job, _)| job.length).sum(), pieces, ..Self::default() }
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
    /// Fills device memory from data files.
    ///
    /// # Errors
    /// The first error of any lane. Memory holds anything then.
    pub(crate) fn load(&mut self, driver: &Driver, fill: &Fill, reader: &DataReader) -> Result<(), EngineError> {
        self.run(fill.pieces.len(), |lane, i| {
            let (job, piece) = &fill.pieces[i];
            let way = enter(driver, lane, job)?;
            if matches!(piece.storage, Storage::Zero) && job.array.is_none() {
                // SAFETY: the device range was allocated for this piece.
                unsafe { job.set_zero(driver, way.stream)? };
                wait(driver, way)?;
                fill.set.fetch_add(job.length, Relaxed);
            } else {
                load_piece(driver, lane, job, piece, reader)?;
            }
            fill.loaded.fetch_add(job.length, Relaxed);
            Ok(())
        })
    }
}

fn load_piece(driver: &Driver, lane: &Lane, job: &Job, piece: &Piece, reader: &DataReader) -> Result<(), EngineError> {
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
    reader.read(piece, content)?;
    // SAFETY: the device range was allocated for this piece; the content lives until the copy is done.
    unsafe { job.write(driver, content, way.stream)? };
    Ok(wait(driver, way)?)
}

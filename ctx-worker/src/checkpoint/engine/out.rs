//! How lanes save: the steps of each lane for each piece.
//!
//! ```text
//!   take a job ─> copy into the lane's buffer: its memory may be written ─> room on the stage? ─yes─> leave it there
//!        ^                                                                        └──no──> hash, write
//!        └── none left, or it may not go on yet: hash and write what is on the stage
//! ```
//!
//! So pieces leave the device at the speed of the link as long as there is room on the stage, and at the speed of the files
//! afterwards. Before each piece a lane checks whether it may continue (see [`super::pace`]).
//!
//! While the application is stopped, all lanes work, three for two cores. Once it runs, those beyond half of the cores rest until a command waits
//! for a job, and the others yield their core to any thread that wants it.

use rekindle_images::{DataWriter, PIECE_LENGTH, Storage};

use super::lane::{Lane, enter, wait};
use super::pace::Pace;
use super::stage::{Queue, Slot, Stage};
use crate::checkpoint::copying::{Copying, Taken};
use crate::gpu::driver::Driver;
use crate::resources::job::{EngineError, Job};

/// The niceness of lanes while an application runs: they use a core fully that no other thread wants, and a tenth of a core
/// that another thread wants.
const NICE: libc::c_int = 10;

/// A copy of jobs' memory into data files.
pub(super) struct Out<'a> {
    driver: &'a Driver,
    copying: &'a Copying,
    writer: &'a DataWriter,
    stage: &'a Stage,
    pace: &'a Pace,
    /// The number of lanes that work while the application runs.
    few: usize,
    /// The pieces on the stage.
    staged: Queue<(Taken, Slot)>,
}

impl<'a> Out<'a> {
    pub(super) fn new(
        driver: &'a Driver,
        copying: &'a Copying,
        writer: &'a DataWriter,
        stage: &'a Stage,
        pace: &'a Pace,
        few: usize,
    ) -> Self {
        Self { driver, copying, writer, stage, pace, few, staged: Queue::default() }
    }

    /// Runs one lane until no job is left. Commands that wait for a job are also told of a failure.
    pub(super) fn copy(&self, lane: &mut Lane, number: usize) -> Result<(), EngineError> {
        // Otherwise others would wait for the job that this lane has taken.
        let _unwound = FailsIfUnwound(self.copying);
        self.try_copy(lane, number).inspect_err(|_| self.copying.fail())
    }

    fn try_copy(&self, lane: &mut Lane, number: usize) -> Result<(), EngineError> {
        let copying = self.copying;
        let mut aside = false;
        loop {
            if copying.is_beside_it() {
                if number >= self.few {
                    if !copying.wait_until_awaited() {
                        return Ok(());
                    }
                } else if !aside {
                    aside = true;
                    step_aside();
                }
            }
            // Waits before taking a job: the job may be cloned meanwhile, and a job that a command waits for goes first.
            let device = copying.next_device();
            let no_more = || copying.next_device().is_none() || !self.staged.is_empty();
            let turn = device.filter(|device| self.pace.wait(*device, PIECE_LENGTH, no_more));
            if turn.is_none() {
                if let Some((taken, slot)) = self.staged.pop() {
                    self.write(&taken, slot.bytes(taken.job.length))?;
                    continue;
                }
                // The lane may not copy yet, and another lane has taken the piece from the stage.
                if device.is_some() {
                    continue;
                }
            }
            let taken = copying.take();
            let took = taken.map(|it| (it.job.device, it.job.length));
            self.pace.correct(turn.map(|device| (device, PIECE_LENGTH)), took);
            match taken {
                Some(taken) => self.copy_one(lane, taken)?,
                // Another lane may have put a piece there since.
                None if self.staged.is_empty() => return Ok(()),
                None => {}
            }
        }
    }

    fn copy_one(&self, lane: &mut Lane, taken: Taken) -> Result<(), EngineError> {
        // While a command waits, the lane does not check whether transfers are done.
        if !taken.urgent {
            self.pace.give_way(taken.job.device, || self.copying.has_failed());
        }
        let content = self.read(lane, &taken)?;
        match self.stage.take() {
            Some(mut slot) => {
                slot.fill(content);
                self.staged.push((taken, slot));
                Ok(())
            }
            None => self.write(&taken, content),
        }
    }

    /// Copies a job's memory into the lane's buffer. From then on the memory may be written.
    fn read<'lane>(&self, lane: &'lane mut Lane, taken: &Taken) -> Result<&'lane [u8], EngineError> {
        let (driver, job) = (self.driver, taken.job);
        let read = enter(driver, lane, &job).and_then(|way| {
            // SAFETY: the buffer holds a piece, and jobs are no longer than one; the device range is the client's, or a
            // clone.
            unsafe { job.read(driver, lane.buffer, way.stream)? };
            wait(driver, way)
        });
        if let Err(failed) = read {
            // Nothing is being read any more, nor will be: threads that wait for that continue.
            self.copying.fail();
            self.copying.is_not_read(taken);
            return Err(failed.into());
        }
        self.copying.is_read(taken);
        // SAFETY: the piece lies there now; the lane is borrowed as long as the content is.
        Ok(unsafe { std::slice::from_raw_parts(lane.buffer, job.length as usize) })
    }

    /// Writes a job's content into a data file, if the content is the same as at the quiesce and the copy was not given up.
    /// After that the memory is not preserved.
    fn write(&self, taken: &Taken, content: &[u8]) -> Result<(), EngineError> {
        let (copying, writer) = (self.copying, self.writer);
        if copying.has_failed() {
            return Ok(());
        }
        let task = &copying.tasks[taken.index];
        let of_device = copying.hashes.of(taken.index);
        let hash = of_device.unwrap_or_else(|| writer.hash(content));
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
        // A load compares the hashes of all content but zeros, which it sets.
        if of_device.is_some() && matches!(piece.storage, Storage::Zero) && writer.hash(content) != hash {
            let Job { address, length, .. } = taken.job;
            return Err(EngineError::NotCopied { address, length });
        }
        copying.is_written(taken, piece);
        Ok(())
    }

    /// Called when no lane works any more: writes the pieces that are left on the stage, and returns the result of the copy.
    pub(super) fn end(self) -> Result<(), EngineError> {
        let mut rest = std::iter::from_fn(|| self.staged.pop());
        rest.try_for_each(|(taken, slot)| self.write(&taken, slot.bytes(taken.job.length)))
            .inspect_err(|_| self.copying.fail())?;
        match self.copying.wrong() {
            Some((address, length)) => Err(EngineError::MispredictedWrite { address, length }),
            None if self.copying.has_failed() => Err(EngineError::Cancelled),
            None => Ok(()),
        }
    }
}

/// Fails the copy if a lane panics.
struct FailsIfUnwound<'a>(&'a Copying);

impl Drop for FailsIfUnwound<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail();
        }
    }
}

/// Yields the core to other threads from now on: the thread cannot undo that.
fn step_aside() {
    // SAFETY: no pointers. On Linux it is the calling thread that becomes nicer; where it may not, nothing changes.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

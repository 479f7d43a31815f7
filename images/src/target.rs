//! The data files that a writer has, and which one a thread writes to.
//!
//! A file takes one write at a time on many file systems (its inode is locked), several files take several: on one in
//! memory 16 threads wrote 7 GB/s into one file and 54 into one each (`scripts/bench write`).

use std::fs::File;
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::direct::Direct;
use crate::limits::{BLOCK, PIECE_LENGTH};
use crate::names::data_name;
use crate::{ImageError, sys};

/// A data file that is being written.
#[derive(Debug)]
pub(crate) struct Target {
    /// N of `rekindle-data-N.raw`.
    pub(crate) index: u32,
    name: String,
    file: File,
    direct: Option<Direct>,
    end: AtomicU64,
    /// The number of threads that write to the file now.
    writers: AtomicUsize,
}

impl Target {
    /// Appends behind what is in the file.
    pub(crate) fn new(index: u32, file: File) -> Result<Self, ImageError> {
        let name = data_name(index);
        let length = file.metadata().map_err(|error| ImageError::io("read the size of", &*name, error))?.len();
        let end = AtomicU64::new(length.next_multiple_of(BLOCK));
        Ok(Self { index, name, file, direct: None, end, writers: AtomicUsize::new(0) })
    }

    pub(crate) fn set_direct(&mut self, direct: Direct) {
        self.direct = Some(direct);
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Bytes reserved so far, padding included: what the file's length will be.
    pub(crate) fn length(&self) -> u64 {
        self.end.load(Ordering::Relaxed)
    }

    /// Sets a place aside for `length` bytes: its offset in the file, a multiple of [`BLOCK`]. Refused where the file
    /// would become longer than a file can be.
    pub(crate) fn reserve(&self, length: u64) -> Result<u64, ImageError> {
        let next = |end: u64| {
            let next = end.checked_add(length)?.checked_next_multiple_of(BLOCK)?;
            (next <= i64::MAX as u64).then_some(next)
        };
        self.end.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).map_err(|end| ImageError::Invalid {
            what: format!("{length} bytes more in {}, which has {end}", self.name),
        })
    }

    /// Writes all of `content` at an offset that was reserved. When it fails, a part may have been written.
    pub(crate) fn write_at(&self, offset: u64, content: &[u8]) -> Result<(), ImageError> {
        let failed = |error| ImageError::write(&self.name, content.len() as u64, error);
        if let Some(direct) = &self.direct
            && direct.write_at(offset, content).map_err(failed)?
        {
            return Ok(());
        }
        self.file.write_all_at(content, offset).map_err(failed)
    }

    /// Waits until what was written is on the disk. Its failure is told here and nowhere else: who opened the file first
    /// does not hear of it again. Where it cannot be asked for, what was written is as good as there.
    pub(crate) fn sync(&self) -> Result<(), ImageError> {
        match self.file.sync_data() {
            Err(error) if !matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EROFS | libc::ENOSYS)) => {
                Err(ImageError::write(&self.name, 0, error))
            }
            _ => Ok(()),
        }
    }

    /// Makes a range zero.
    pub(crate) fn erase(&self, offset: u64, length: u64) -> Result<(), ImageError> {
        if length == 0 || sys::punch_hole(&self.file, offset, length).is_ok() {
            return Ok(());
        }
        // A file system that has no holes.
        let zeros = vec![0; length.min(PIECE_LENGTH) as usize];
        for at in (0..length).step_by(zeros.len()) {
            self.write_at(offset + at, &zeros[..(length - at).min(PIECE_LENGTH) as usize])?;
        }
        Ok(())
    }

    /// Makes everything zero but these ranges, which may be in any order and overlap.
    pub(crate) fn erase_but(&self, mut used: Vec<(u64, u64)>) -> Result<(), ImageError> {
        used.sort_unstable();
        let (length, mut covered) = (self.length(), 0);
        for (start, end) in used.into_iter().chain([(length, length)]) {
            // A piece's last block is zero behind it already.
            let from = u64::next_multiple_of(covered, BLOCK);
            if start > from {
                self.erase(from, start.min(length).saturating_sub(from))?;
            }
            covered = covered.max(end.min(length));
        }
        Ok(())
    }

    /// Gives the file its final length, and returns it.
    pub(crate) fn seal(&self) -> Result<u64, ImageError> {
        let length = self.length();
        match self.file.set_len(length) {
            Ok(()) => Ok(length),
            Err(error) => Err(ImageError::write(&self.name, 0, error)),
        }
    }

    /// Says that a thread writes to it, as long as the answer lives.
    pub(crate) fn enter(&self) -> Writing<'_> {
        self.writers.fetch_add(1, Ordering::Relaxed);
        Writing(self)
    }
}

/// A file that a thread writes to now.
pub(crate) struct Writing<'a>(&'a Target);

impl Deref for Writing<'_> {
    type Target = Target;

    fn deref(&self) -> &Target {
        self.0
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.writers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The first of those files to which the fewest threads write: the first one for a thread that is alone. `None` only
/// where there is none.
pub(crate) fn pick(targets: &[Target]) -> Option<Writing<'_>> {
    loop {
        let mut best: Option<(&Target, usize)> = None;
        for target in targets {
            let writers = target.writers.load(Ordering::Relaxed);
            if best.is_none_or(|(_, least)| writers < least) {
                best = Some((target, writers));
            }
            if writers == 0 {
                break;
            }
        }
        let (target, writers) = best?;
        // Another thread may have come to the same choice.
        let entered = target.writers.compare_exchange(writers, writers + 1, Ordering::Relaxed, Ordering::Relaxed);
        if entered.is_ok() {
            return Some(Writing(target));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(count: u32) -> Vec<Target> {
        (0..count).map(|index| Target::new(index, tempfile::tempfile().unwrap()).unwrap()).collect()
    }

    #[test]
    fn each_thread_has_a_file_as_long_as_there_are_some() {
        let targets = targets(3);
        let picked = || pick(&targets).unwrap();
        // Alone.
        for _ in 0..2 {
            assert_eq!(picked().index, 0);
        }
        let first: Vec<_> = (0..3).map(|_| picked()).collect();
        assert_eq!(first.iter().map(|it| it.index).collect::<Vec<_>>(), [0, 1, 2]);
        // Where there are none left they share.
        let more: Vec<_> = (0..4).map(|_| picked()).collect();
        assert_eq!(more.iter().map(|it| it.index).collect::<Vec<_>>(), [0, 1, 2, 0]);
        drop(more);
        // A file that a thread writes to by its own choice counts as in use too.
        drop(first);
        let _there = targets[0].enter();
        assert_eq!(picked().index, 1);
        assert!(pick(&[]).is_none());
    }

    #[test]
    fn threads_that_choose_at_the_same_time_choose_apart() {
        let targets = targets(4);
        let both = std::sync::Barrier::new(4);
        for _ in 0..200 {
            let mut all: Vec<u32> = std::thread::scope(|scope| {
                let one = || {
                    both.wait();
                    let writing = pick(&targets).unwrap();
                    both.wait();
                    writing.index
                };
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(one)).collect();
                threads.into_iter().map(|it| it.join().unwrap()).collect()
            });
            all.sort_unstable();
            assert_eq!(all, [0, 1, 2, 3]);
        }
    }

    #[test]
    fn a_reservation_past_the_end_of_all_files_is_refused() {
        let target = targets(1).remove(0);
        target.reserve(1).unwrap();
        assert!(target.reserve(u64::MAX).is_err());
        assert!(target.reserve(i64::MAX as u64).is_err());
        assert_eq!(target.length(), BLOCK);
    }
}

//! Writing past the page cache, where that is known to be faster: the kernel neither copies what is written nor has to
//! bring it to the disk at the end, all at once.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::limits::{BLOCK, PIECE_LENGTH};
use crate::sys;

/// How much of all files of a writer gets its blocks at a time. Writes to blocks that are there do not wait for each other.
const AHEAD: u64 = 64 << 20;

/// A data file, opened with `O_DIRECT` too.
#[derive(Debug)]
pub(crate) struct Direct {
    file: File,
    /// How much of this one gets its blocks at a time.
    ahead: u64,
    /// Up to where the file has its blocks.
    reserved: AtomicU64,
    reserving: Mutex<()>,
    /// The file system has refused, and would again.
    refused: AtomicBool,
}

impl Direct {
    /// Makes a writer for `file`, which is among `of` files. Each of them reserves only its share of blocks ahead, since free
    /// space that a file has reserved is not there for the others.
    pub(crate) fn new(file: File, of: u64) -> Self {
        let ahead = (AHEAD / of.max(1)).max(PIECE_LENGTH);
        let (reserved, refused) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { file, ahead, reserved, reserving: Mutex::default(), refused }
    }

    /// Writes all of it, if it can be written this way: where content, length and place are at block boundaries. Whether
    /// it was; otherwise it must be written in the ordinary way.
    pub(crate) fn write_at(&self, offset: u64, content: &[u8]) -> io::Result<bool> {
        let aligned = |number: u64| number.is_multiple_of(BLOCK);
        let all_aligned = aligned(offset) && aligned(content.len() as u64) && aligned(content.as_ptr() as u64);
        if !all_aligned || self.refused.load(Ordering::Relaxed) {
            return Ok(false);
        }
        self.reserve(offset + content.len() as u64);
        match self.file.write_all_at(content, offset) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                self.refused.store(true, Ordering::Relaxed);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Sees that the file has its blocks up to there. Where there is no room for so many it does without: what is
    /// written may fit.
    fn reserve(&self, end: u64) {
        if end <= self.reserved.load(Ordering::Relaxed) {
            return;
        }
        let _one = self.reserving.lock().unwrap_or_else(PoisonError::into_inner);
        let from = self.reserved.load(Ordering::Relaxed);
        if end > from {
            let to = end.next_multiple_of(self.ahead);
            let reserved = match sys::reserve(&self.file, from, to - from) {
                Ok(()) => to,
                Err(_) => u64::MAX,
            };
            self.reserved.store(reserved, Ordering::Relaxed);
        }
    }
}

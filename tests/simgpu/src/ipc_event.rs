//! Events that processes share: two words in a file, the number of records and the number of those that are done.

use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY,
};

use crate::memory::pages::{self, PAGE};
use crate::status::{Result, ensure};

const MAGIC: u64 = u64::from_le_bytes(*b"simgpu e");

/// The shared part of an event. Its page stays mapped as long as the process lives: streams may still use it.
#[derive(Debug)]
pub(crate) struct SharedEvent {
    file: OwnedFd,
    words: &'static [AtomicU64; 2],
}

/// A record of the event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Last {
    words: &'static [AtomicU64; 2],
    count: u64,
}

impl Last {
    /// Whether the record is done.
    pub(crate) fn is_done(&self) -> bool {
        self.words[1].load(Ordering::SeqCst) >= self.count
    }

    /// Waits until the record is done.
    pub(crate) fn wait(&self) {
        while !self.is_done() {
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
    }
}

impl SharedEvent {
    pub(crate) fn new() -> Result<Self> {
        Self::of(pages::memfd(c"simgpu-event", PAGE).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?)
    }

    fn of(file: OwnedFd) -> Result<Self> {
        let at = pages::reserve(0, PAGE).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        pages::place_file(at, PAGE, &file).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        // SAFETY: a page of its own, which is never unmapped.
        let words = unsafe { &*(at as *const [AtomicU64; 2]) };
        Ok(Self { file, words })
    }

    /// The words that a stream writes when it comes to a record.
    pub(crate) fn words(&self) -> &'static [AtomicU64; 2] {
        self.words
    }

    /// Counts a record.
    pub(crate) fn count(&self) -> u64 {
        self.words[0].fetch_add(1, Ordering::SeqCst) + 1
    }

    /// The last record, if there is one.
    pub(crate) fn last(&self) -> Option<Last> {
        let count = self.words[0].load(Ordering::SeqCst);
        (count > 0).then_some(Last { words: self.words, count })
    }

    /// The handle that applications pass on.
    pub(crate) fn handle(&self) -> [u8; 64] {
        let mut handle = [0; 64];
        let words = [MAGIC, u64::from(std::process::id()), self.file.as_raw_fd() as u64];
        for (place, word) in handle.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        handle
    }

    /// Opens the event of another process.
    pub(crate) fn open(handle: &[u8; 64]) -> Result<Self> {
        let word =
            |at: usize| handle[at * 8..at * 8 + 8].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        let [magic, pid, file]: [u64; 3] = std::array::from_fn(word);
        ensure(magic == MAGIC, CUDA_ERROR_INVALID_VALUE)?;
        ensure(pid != u64::from(std::process::id()), CUDA_ERROR_INVALID_CONTEXT)?;
        let path = format!("/proc/{pid}/fd/{file}");
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|_| CUDA_ERROR_INVALID_HANDLE)?;
        Self::of(file.into())
    }
}

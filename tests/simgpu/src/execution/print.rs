//! Text that kernels print, and messages of failed assertions: kept until the program synchronises, then written to its output.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// A context's printed text that has not been written yet.
#[derive(Debug, Default)]
pub(crate) struct Prints(Mutex<Vec<u8>>);

unsafe extern "C" {
    /// C's `stdout`: text written through it keeps its place among the program's own output.
    pub(crate) static stdout: *mut libc::FILE;
    /// C's `stderr`.
    pub(crate) static stderr: *mut libc::FILE;
}

impl Prints {
    /// Adds text.
    pub(crate) fn add(&self, text: &[u8]) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(text);
    }

    /// Writes the text to one of C's streams.
    pub(crate) fn flush(&self, stream: *mut libc::FILE) {
        let mut text = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !text.is_empty() {
            // SAFETY: C's own stream, which locks itself, and bytes that are there.
            unsafe { libc::fwrite(text.as_ptr().cast::<c_void>(), 1, text.len(), stream) };
            text.clear();
        }
    }
}

//! How far a copy is.

use std::sync::atomic::{AtomicU64, Ordering};

/// How far a copy or a verification is, in bytes of content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are done: holes, and what was there already, among them.
    pub done: u64,
    /// All bytes.
    pub total: u64,
}

/// Told of progress, by any thread.
pub type OnProgress<'a> = &'a (dyn Fn(Progress) + Sync);

/// Counts, and tells.
pub(crate) struct Meter<'a> {
    done: AtomicU64,
    total: u64,
    tell: OnProgress<'a>,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(total: u64, tell: OnProgress<'a>) -> Self {
        Self { done: AtomicU64::new(0), total, tell }
    }

    pub(crate) fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        (self.tell)(Progress { done: done.min(self.total), total: self.total });
    }
}

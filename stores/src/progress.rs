//! How far a copy is.

use std::sync::{Mutex, PoisonError};

/// How far a copy or a verification is, in bytes of content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are done: holes, and what was there already, among them.
    pub done: u64,
    /// All bytes.
    pub total: u64,
}

/// Told of progress, by any thread, by one at a time and in order.
pub type OnProgress<'a> = &'a (dyn Fn(Progress) + Sync);

/// Counts, and tells.
pub(crate) struct Meter<'a> {
    done: Mutex<u64>,
    total: u64,
    tell: OnProgress<'a>,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(total: u64, tell: OnProgress<'a>) -> Self {
        Self { done: Mutex::new(0), total, tell }
    }

    pub(crate) fn add(&self, bytes: u64) {
        // Held while it tells, so that nobody hears of less after more.
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        *done = done.saturating_add(bytes);
        (self.tell)(Progress { done: self.total.min(*done), total: self.total });
    }
}

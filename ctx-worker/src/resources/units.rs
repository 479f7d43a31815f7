//! Ranges of memory that are tracked as one, and values that tell whether they have changed.

use std::ops::{Deref, DerefMut};

/// A unit of tracking: an allocation, a run of the client's own mappings without a gap, a variable of its code, or a pinned
/// allocation; or an array, by its handle, which is no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Unit {
    pub(crate) start: u64,
    /// The address behind the last byte.
    pub(crate) end: u64,
}

impl Unit {
    pub(crate) fn new(start: u64, size: u64) -> Self {
        Self { start, end: start.saturating_add(size) }
    }

    /// An array, by the client's handle.
    pub(crate) fn array(handle: u64) -> Self {
        Self::new(handle, 1)
    }

    pub(crate) fn size(&self) -> u64 {
        self.end - self.start
    }
}

/// A value with the number of times that it may have changed: a reader compares the number to know whether to read again.
#[derive(Debug, Default)]
pub(crate) struct Versioned<T> {
    value: T,
    version: u64,
}

impl<T> Versioned<T> {
    pub(crate) fn version(&self) -> u64 {
        self.version
    }
}

impl<T> From<T> for Versioned<T> {
    fn from(value: T) -> Self {
        Self { value, version: 1 }
    }
}

impl<T> Deref for Versioned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Versioned<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.version += 1;
        &mut self.value
    }
}

/// Joins ranges that follow each other without a gap. The ranges are sorted.
pub(crate) fn join(ranges: impl Iterator<Item = (u64, u64)>) -> Vec<Unit> {
    let mut runs: Vec<Unit> = Vec::new();
    for (start, size) in ranges {
        match runs.last_mut() {
            Some(run) if run.end == start => run.end = start.saturating_add(size),
            _ => runs.push(Unit::new(start, size)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_a_new_version() {
        let mut value = Versioned::from(vec![1]);
        let first = value.version();
        assert_eq!((value.len(), value.version()), (1, first));
        value.push(2);
        assert_ne!(value.version(), first);
    }
}

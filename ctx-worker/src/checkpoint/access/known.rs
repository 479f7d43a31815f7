//! The tracker's knowledge of objects, by their handles.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};

/// The number of entries below which none is dropped.
const FEW: usize = 64;

/// Entries by the handles of their objects. An object can end in many places, and none of them tells the tracker. So an insert
/// drops the entries of objects that are gone, when there are twice as many entries as after the last time.
pub(super) struct Known<T> {
    entries: HashMap<u64, T>,
    look_at: usize,
}

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self { entries: HashMap::new(), look_at: FEW }
    }
}

impl<T> Known<T> {
    /// Adds an entry, or replaces it. `lives` tells whether a handle's object still exists.
    pub(super) fn insert(&mut self, handle: u64, entry: T, lives: impl Fn(u64) -> bool) {
        if self.entries.len() >= self.look_at {
            self.entries.retain(|handle, _| lives(*handle));
            self.look_at = FEW.max(2 * self.entries.len());
        }
        self.entries.insert(handle, entry);
    }
}

impl<T> Deref for Known<T> {
    type Target = HashMap<u64, T>;

    fn deref(&self) -> &Self::Target {
        &self.entries
    }
}

impl<T> DerefMut for Known<T> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_objects_that_are_gone_go_too_and_those_of_others_stay() {
        let mut known = Known::default();
        // Ten objects live for ever, each other object until the next one is added.
        for handle in 0..10_000 {
            known.insert(handle, (), |it| it < 10 || it + 1 == handle);
            assert!(known.len() <= 2 * FEW, "{}", known.len());
        }
        assert!((0..10).all(|handle| known.contains_key(&handle)));
    }
}

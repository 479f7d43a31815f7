//! One condition of a graph, and the values of all of them.

use std::sync::{Arc, Mutex, PoisonError};

use rekindle_cuda_abi::types::*;

/// A condition of a graph.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Condition {
    pub(crate) context: CUcontext,
    /// The value that it gets at each launch, if it `assigns`.
    pub(crate) default: u32,
    pub(crate) assigns: bool,
    /// The node that looks at it.
    pub(crate) node: Option<CUgraphNode>,
}

/// The values of a graph's conditions. They stay from one launch to the next.
#[derive(Clone, Debug, Default)]
pub struct Values(Arc<Mutex<Vec<u32>>>);

impl Values {
    /// The value of a condition; 0 if it was never set.
    #[must_use]
    pub fn get(&self, handle: u64) -> u32 {
        let values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        place(handle).and_then(|place| values.get(place)).copied().unwrap_or(0)
    }

    /// Sets the value of a condition; `false` if there is none of that handle.
    pub fn set(&self, handle: u64, value: u32) -> bool {
        let mut values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = place(handle).and_then(|place| values.get_mut(place));
        found.map(|it| *it = value).is_some()
    }

    /// A further condition, whose value is 0.
    pub(crate) fn add(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(0);
    }
}

/// The place of a condition among those of its graph.
pub(crate) fn place(handle: u64) -> Option<usize> {
    usize::try_from(handle).ok()?.checked_sub(1)
}

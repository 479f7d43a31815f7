//! Counts of each driver call that a client asks for, and of those that are refused. The client counts in the shared memory,
//! so that a worker can read the counts, and a restored process goes on from where it was.
//!
//! ```text
//!   stripe 0   u64 x CALL_FUNCTIONS   asked for, by threads 0, CALL_STRIPES, 2 CALL_STRIPES, ...
//!   ...
//!   stripe CALL_STRIPES               refused, by all
//! ```
//!
//! A thread counts by a plain load and store of a line that no other thread writes: an atomic addition would cost as much as
//! a tenth of a launch. Where threads share a stripe, a count may be lost.

use std::sync::atomic::Ordering::Relaxed;

use crate::layout::{CALL_FUNCTIONS, CALL_STRIPES, Shared};

/// A client's calls of one function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Count {
    /// The function's place in the driver table.
    pub function: u16,
    /// Calls.
    pub asked: u64,
    /// Calls that were answered with `CUDA_ERROR_NOT_SUPPORTED`.
    pub refused: u64,
}

/// The application's side: a thread calls a function.
#[inline]
pub fn asked(shared: &Shared, thread: u32, function: u16) {
    if let Some(count) = shared.calls(thread as usize % CALL_STRIPES).get(function as usize) {
        count.store(count.load(Relaxed).wrapping_add(1), Relaxed);
    }
}

/// The application's side: a call is refused.
#[cold]
pub fn refused(shared: &Shared, function: u16) {
    if let Some(count) = shared.calls(CALL_STRIPES).get(function as usize) {
        count.fetch_add(1, Relaxed);
    }
}

/// The worker's side: the functions that were asked for. The client may write what it likes: these are its own numbers.
pub fn read(shared: &Shared) -> Vec<Count> {
    let count = |function: usize| {
        let of = |stripe: usize| shared.calls(stripe).get(function).map_or(0, |c| c.load(Relaxed));
        let asked = (0..CALL_STRIPES).fold(0, |sum: u64, stripe| sum.saturating_add(of(stripe)));
        let refused = of(CALL_STRIPES);
        Some(Count { function: function as u16, asked, refused }).filter(|_| asked > 0 || refused > 0)
    };
    (0..CALL_FUNCTIONS).filter_map(count).collect()
}

/// The worker's side: the calls that were refused.
pub fn refusals(shared: &Shared) -> u64 {
    let counts = (0..CALL_FUNCTIONS).filter_map(|function| shared.calls(CALL_STRIPES).get(function));
    counts.fold(0, |sum: u64, count| sum.saturating_add(count.load(Relaxed)))
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
mod tests {
    use super::*;
    use crate::layout::heap;

    #[test]
    fn threads_add_up_and_refusals_are_told_apart() {
        let shared = heap();
        for thread in 0..20 {
            asked(&shared, thread, 7);
        }
        asked(&shared, 3, 700);
        refused(&shared, 700);
        asked(&shared, 1, u16::MAX);
        refused(&shared, u16::MAX);
        let counts = read(&shared);
        let expected = [Count { function: 7, asked: 20, refused: 0 }, Count { function: 700, asked: 1, refused: 1 }];
        assert_eq!(counts, expected);
        assert_eq!(refusals(&shared), 1);
    }

    #[test]
    fn the_table_fits() {
        let table = rekindle_cuda_abi::table::parse(rekindle_cuda_abi::table::TEXT).unwrap();
        assert!(table.len() <= CALL_FUNCTIONS);
    }
}

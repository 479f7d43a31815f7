//! How often memory is copied while the processes run.
//!
//! Each round copies what has changed since the one before. Another round is worth it as long as it leaves less to copy while the
//! processes stand still. It does so by the time that a round takes: what changes meanwhile is what the next one has to copy. So
//! rounds end when the last one was short enough, or when it was hardly shorter than the one before: then the processes write as
//! fast as the memory is copied.

use std::time::Duration;

/// The most rounds.
const MOST: usize = 10;
/// A round is worth another if it has taken at most this part of the time of the one before: per cent.
const SHRINKS: u32 = 80;

/// A round is loaded anew at the target if what has changed since the last one that was is more than this part of the first round.
const RELOAD: u64 = 8;

/// The rounds so far.
#[derive(Debug)]
pub(super) struct Rounds {
    /// What the processes may stand still for, as far as GPU memory is concerned.
    pause: Duration,
    took: Vec<Duration>,
    /// Bytes of the first round, and of those since the last one that is loaded at the target.
    first: u64,
    changed: u64,
}

impl Rounds {
    pub(super) fn new(pause: Duration) -> Self {
        Self { pause, took: Vec::new(), first: 0, changed: 0 }
    }

    /// A round of so many bytes has taken so long, until all of it was at the target.
    pub(super) fn done(&mut self, took: Duration, bytes: u64) {
        if self.took.is_empty() {
            self.first = bytes;
        }
        self.changed = self.changed.saturating_add(bytes);
        self.took.push(took);
    }

    /// Whether the target is to load the last round meanwhile, which it does beside the next one.
    pub(super) fn is_to_be_loaded(&mut self) -> bool {
        let is_worth_it = self.changed > 0 && (self.took.len() == 1 || self.changed > self.first / RELOAD);
        let is_loaded = is_worth_it && self.goes_on();
        if is_loaded {
            self.changed = 0;
        }
        is_loaded
    }

    /// Whether another round is worth it.
    pub(super) fn goes_on(&self) -> bool {
        match self.took.as_slice() {
            [] => true,
            took if took.len() >= MOST => false,
            [.., last] if *last <= self.pause => false,
            [_] => true,
            [.., before, last] => last.as_nanos() * 100 <= before.as_nanos() * u128::from(SHRINKS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of rounds for memory of which `rate` bytes are written for each byte that can be copied.
    fn rounds(rate: f64, pause_ms: u64) -> usize {
        let mut rounds = Rounds::new(Duration::from_millis(pause_ms));
        let mut took = Duration::from_secs(10);
        while rounds.goes_on() {
            rounds.done(took, 0);
            took = took.mul_f64(rate);
        }
        rounds.took.len()
    }

    #[test]
    fn rounds_are_loaded_beside_the_next_one_when_much_has_changed_since() {
        let mut rounds = Rounds::new(Duration::from_millis(100));
        let mut loaded = |ms, bytes| {
            rounds.done(Duration::from_millis(ms), bytes);
            rounds.is_to_be_loaded()
        };
        assert!(loaded(9_000, 800));
        assert!(!loaded(5_000, 60) && loaded(3_000, 60), "120 of 800 bytes");
        assert!(!loaded(2_000, 100), "an eighth and no more");
        assert!(!loaded(90, 900), "it is the last one");
        let mut rounds = Rounds::new(Duration::ZERO);
        rounds.done(Duration::from_millis(5), 0);
        assert!(!rounds.is_to_be_loaded(), "there is nothing to load");
    }

    #[test]
    fn rounds_end_when_they_are_short_or_do_not_become_shorter() {
        assert_eq!(rounds(0.0, 100), 2);
        assert_eq!(rounds(0.1, 100), 3);
        assert_eq!(rounds(0.5, 100), 8);
        assert_eq!(rounds(0.5, 6_000), 2);
        assert_eq!(rounds(1.0, 100), 2, "it writes as fast as it is copied");
        assert_eq!(rounds(3.0, 100), 2);
        assert_eq!(rounds(0.79, 1), MOST);
    }
}

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

/// The rounds so far.
#[derive(Debug)]
pub(super) struct Rounds {
    /// What the processes may stand still for, as far as GPU memory is concerned.
    pause: Duration,
    took: Vec<Duration>,
}

impl Rounds {
    pub(super) fn new(pause: Duration) -> Self {
        Self { pause, took: Vec::new() }
    }

    /// A round has taken so long, until all of it was at the target.
    pub(super) fn done(&mut self, took: Duration) {
        self.took.push(took);
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
            rounds.done(took);
            took = took.mul_f64(rate);
        }
        rounds.took.len()
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

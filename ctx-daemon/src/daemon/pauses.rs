//! How often somebody who works is asked how far the work is.

use std::time::Duration;

/// The shortest pause between two questions.
const LEAST: Duration = Duration::from_millis(1);

/// The pause until the next question, `most` at the most: short at first and towards the end, so that short work, and the end of long work,
/// are noticed at once. `done` of `all` are done after `elapsed`.
pub(super) fn next(elapsed: Duration, done: u64, all: u64, most: Duration) -> Duration {
    let left = all.saturating_sub(done) as f64 / done.max(1) as f64;
    let half = Duration::try_from_secs_f64(elapsed.as_secs_f64() * left / 2.0).unwrap_or(most);
    half.min(elapsed).clamp(LEAST, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn pauses_are_short_at_first_and_towards_the_end() {
        let most = 10 * MS;
        assert_eq!(next(Duration::ZERO, 0, 100, most), MS);
        assert_eq!(next(3 * MS, 0, 100, most), 3 * MS);
        assert_eq!(next(3 * MS, 1, 100, most), 3 * MS);
        assert_eq!(next(100 * MS, 10, 100, most), most);
        assert_eq!(next(100 * MS, 95, 100, most).as_millis(), 2);
        assert_eq!(next(100 * MS, 100, 100, most), MS);
        assert_eq!(next(100 * MS, 0, u64::MAX, most), most);
        assert_eq!(next(100 * MS, 0, 0, most), MS, "nothing is to be done");
    }
}

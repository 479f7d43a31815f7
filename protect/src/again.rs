//! When an image is verified again that was good when it was made: a bit that has changed since then is found before the image is
//! needed.
//!
//! One image at a time, that first which was verified the longest time ago, when [`Wishes::verify_every`](crate::record::Wishes) has
//! passed since then. What builds on an image that was found damaged comes first, and at once. What could not be read the last time
//! comes after all others that are due. After each other verification there is a pause of [`PAUSES`] times as long as it took, so that all
//! of them together take a small share of the time.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::shelf::Shelf;

/// How many times as long as a verification the pause after it is. With it, they take a twentieth of the time.
pub const PAUSES: u32 = 19;

/// What former verifications have shown of images, by their numbers.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// They build on damaged ones.
    pub suspects: BTreeSet<u64>,
    /// Nobody knows whether they are good: they could not be read.
    pub unread: BTreeSet<u64>,
}

/// The image that is to be verified now. `is_pause`: whether those that are not suspect have to wait.
#[must_use]
pub fn due(shelf: &Shelf, every: Duration, now_ms: u64, findings: &Findings, is_pause: bool) -> Option<u64> {
    let good = || shelf.good().map(|it| it.number);
    let (suspect, unread): (Vec<_>, Vec<_>) =
        good().filter(|it| findings.suspects.contains(it)).partition(|it| !findings.unread.contains(it));
    let suspect = suspect.first().or(unread.first().filter(|_| !is_pause)).copied();
    if suspect.is_some() || is_pause {
        return suspect;
    }
    let last = |number: u64| shelf.get(number).map_or(0, |it| it.verified_ms.max(it.began_ms));
    // A clock that was ahead says nothing.
    let since = |number: u64| now_ms.checked_sub(last(number)).map(Duration::from_millis);
    let are_due = good().filter(|it| since(*it).is_none_or(|it| it >= every));
    are_due.min_by_key(|it| (findings.unread.contains(it), last(*it), *it))
}

/// How long the others wait after a verification that took so long.
#[must_use]
pub fn pause(took: Duration) -> Duration {
    took.saturating_mul(PAUSES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shelf::{Image, Standing};

    fn shelf(began: &[u64]) -> Shelf {
        let mut shelf = Shelf::default();
        for (number, began_ms) in (1..).zip(began) {
            let on = (number > 1).then(|| number - 1);
            let standing = Standing::Good;
            shelf.add(Image { number, on, standing, began_ms: *began_ms, cost: None, verified_ms: 0 });
        }
        shelf
    }

    #[test]
    fn the_one_that_was_verified_the_longest_time_ago_is_first_and_none_before_its_time() {
        let mut shelf = shelf(&[1000, 2000, 3000]);
        let nobody = Findings::default();
        let at = |shelf: &Shelf, now_ms: u64| due(shelf, Duration::from_secs(10), now_ms, &nobody, false);
        assert_eq!((at(&shelf, 10_999), at(&shelf, 11_000)), (None, Some(1)));
        shelf.verified(1, 11_500);
        assert_eq!((at(&shelf, 11_999), at(&shelf, 12_000), at(&shelf, 99_000)), (None, Some(2), Some(2)));
        shelf.damaged(2, "a byte has changed");
        assert_eq!((at(&shelf, 12_500), at(&shelf, 13_000)), (None, Some(3)));
        shelf.verified(3, 13_000);
        assert_eq!((at(&shelf, 21_499), at(&shelf, 21_500)), (None, Some(1)));
        // A clock that was ahead says nothing, nor how long it was ahead.
        assert_eq!(at(&shelf, 0), Some(1));
        assert_eq!(at(&Shelf::default(), 99_000), None);
    }

    #[test]
    fn what_builds_on_a_damaged_image_waits_for_nothing() {
        let mut shelf = shelf(&[0, 0, 0]);
        shelf.damaged(1, "a byte has changed");
        let mut findings = Findings { suspects: shelf.built_on(1).collect(), ..Findings::default() };
        assert_eq!(findings.suspects, BTreeSet::from([2, 3]));
        let all_day = Duration::from_secs(86_400);
        assert_eq!(due(&shelf, all_day, 1, &findings, true), Some(3), "the newest first, which is needed first");
        findings.unread.insert(3);
        assert_eq!(due(&shelf, all_day, 1, &findings, true), Some(2), "one that cannot be read holds no other up");
        findings.suspects.remove(&2);
        assert_eq!(due(&shelf, all_day, 1, &findings, true), None, "nor is it tried without a pause");
        assert_eq!(due(&shelf, all_day, 1, &findings, false), Some(3));
        findings.suspects = BTreeSet::from([7]);
        assert_eq!(due(&shelf, all_day, 1, &findings, true), None);
    }

    #[test]
    fn an_image_that_cannot_be_read_holds_no_other_up() {
        let mut shelf = shelf(&[1000, 2000, 3000]);
        let mut findings = Findings::default();
        let every = Duration::from_secs(10);
        let at = |shelf: &Shelf, findings: &Findings| due(shelf, every, 13_000, findings, false);
        assert_eq!(at(&shelf, &findings), Some(1));
        findings.unread.insert(1);
        assert_eq!(at(&shelf, &findings), Some(2));
        shelf.verified(2, 13_000);
        assert_eq!(at(&shelf, &findings), Some(3));
        shelf.verified(3, 13_000);
        assert_eq!(at(&shelf, &findings), Some(1), "it is tried again when no other is due");
    }

    #[test]
    fn all_verifications_together_take_a_small_share_of_the_time() {
        // One image after the other, each at once if the policy lets it.
        let shelf = shelf(&[0, 0, 0]);
        let (mut now, mut busy, mut not_before) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
        for took in [3, 100, 7, 40].map(Duration::from_secs).iter().cycle().take(400) {
            let is_pause = now < not_before;
            if is_pause {
                assert_eq!(due(&shelf, Duration::ZERO, now.as_millis() as u64, &Findings::default(), is_pause), None);
                now = not_before;
            }
            assert!(due(&shelf, Duration::ZERO, now.as_millis() as u64, &Findings::default(), false).is_some());
            (now, busy) = (now + *took, busy + *took);
            not_before = now + pause(*took);
        }
        let share = busy.as_secs_f64() / not_before.as_secs_f64();
        assert!((0.04..=0.05).contains(&share), "{share}");
        assert_eq!(pause(Duration::MAX), Duration::MAX);
    }
}

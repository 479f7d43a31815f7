//! Which parts of a range of addresses, or of offsets, are free.

use std::collections::BTreeMap;
use std::ops::Range;

/// Free parts, none of which touches another: what is given back grows together with its neighbours.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FreeRanges {
    /// Lengths, by where the parts begin.
    parts: BTreeMap<u64, u64>,
    total: u64,
}

impl FreeRanges {
    /// All of a range is free.
    #[must_use]
    pub fn all(range: Range<u64>) -> Self {
        let mut free = Self::default();
        free.give(range.start, range.end.saturating_sub(range.start));
        free
    }

    /// How much is free.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Where each part begins, and its length, in the order of addresses.
    pub fn parts(&self) -> impl Iterator<Item = (u64, u64)> {
        self.parts.iter().map(|(start, length)| (*start, *length))
    }

    /// The lowest place that has `length` free.
    #[must_use]
    pub fn first_fit(&self, length: u64) -> Option<u64> {
        self.parts().find(|(_, free)| *free >= length).map(|(start, _)| start)
    }

    /// Where the smallest part that has `length` free begins, and its length; of several, the lowest.
    #[must_use]
    pub fn best_fit(&self, length: u64) -> Option<(u64, u64)> {
        self.parts().filter(|(_, free)| *free >= length).min_by_key(|(_, free)| *free)
    }

    /// Takes `length` from the lowest place that has it free. Nothing has no place.
    pub fn take(&mut self, length: u64) -> Option<u64> {
        let start = self.first_fit(length).filter(|_| length > 0)?;
        self.take_at(start, length).then_some(start)
    }

    /// Takes what lies at `start`. `false`, and nothing is taken, where not all of it is free.
    pub fn take_at(&mut self, start: u64, length: u64) -> bool {
        let Some(end) = start.checked_add(length) else { return false };
        let Some((&before, &free)) = self.parts.range(..=start).next_back() else { return false };
        // No part goes past the last address: `give` has seen to it.
        let behind = before + free;
        if end > behind {
            return false;
        }
        if length == 0 {
            return true;
        }
        self.parts.remove(&before);
        if start > before {
            self.parts.insert(before, start - before);
        }
        if behind > end {
            self.parts.insert(end, behind - end);
        }
        self.total -= length;
        true
    }

    /// Gives back what lies at `start`. `false`, and nothing changes, where some of it is free already or has no address.
    pub fn give(&mut self, start: u64, length: u64) -> bool {
        self.give_within(start, length, 0..u64::MAX)
    }

    /// As [`Self::give`], for what lies within `bounds`, beyond which it grows together with nothing: parts on both sides
    /// of a bound are taken one by one.
    pub fn give_within(&mut self, start: u64, length: u64, bounds: Range<u64>) -> bool {
        let Some(end) = start.checked_add(length) else { return false };
        if length == 0 {
            return true;
        }
        if self.parts.range(..end).next_back().is_some_and(|(before, free)| before + free > start) {
            return false;
        }
        let (mut from, mut to) = (start, end);
        if start > bounds.start
            && let Some((&before, free)) = self.parts.range(..start).next_back()
            && before + free == start
        {
            from = before;
        }
        if end < bounds.end
            && let Some(free) = self.parts.remove(&end)
        {
            to += free;
        }
        self.parts.insert(from, to - from);
        self.total += length;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parts(free: &FreeRanges) -> Vec<(u64, u64)> {
        free.parts().collect()
    }

    #[test]
    fn parts_are_taken_from_the_lowest_place_that_has_room_and_grow_together_again() {
        let mut free = FreeRanges::all(100..200);
        let places: Vec<_> = (0..3).map(|_| free.take(30)).collect();
        assert_eq!((places, free.take(30), free.total()), (vec![Some(100), Some(130), Some(160)], None, 10));
        assert!(free.give(100, 30) && free.give(160, 30));
        assert_eq!(parts(&free), [(100, 30), (160, 40)]);
        assert_eq!((free.first_fit(31), free.best_fit(20), free.best_fit(41)), (Some(160), Some((100, 30)), None));
        assert!(free.give(130, 30));
        assert_eq!((parts(&free), free.total()), (vec![(100, 100)], 100));
    }

    #[test]
    fn a_part_grows_together_within_its_bounds_only() {
        let mut free = FreeRanges::default();
        assert!(free.give_within(0, 64, 0..64) && free.give_within(64, 64, 64..128));
        assert_eq!((parts(&free), free.first_fit(65)), (vec![(0, 64), (64, 64)], None));
        assert!(free.take_at(32, 32) && free.take_at(64, 64));
        assert!(free.give_within(64, 64, 64..128) && free.give_within(32, 32, 0..64));
        assert_eq!(parts(&free), [(0, 64), (64, 64)]);
        assert!(!free.take_at(32, 64));
    }

    #[test]
    fn what_is_free_is_not_given_back_and_what_is_taken_is_not_taken_again() {
        let mut free = FreeRanges::all(100..200);
        let whole = free.clone();
        for (start, length) in [(100, 100), (90, 11), (199, 10), (120, 1), (50, 500), (u64::MAX, 1)] {
            assert!(!free.give(start, length), "{start} {length}");
        }
        for (start, length) in [(99, 1), (200, 1), (150, 51), (90, 20), (150, u64::MAX)] {
            assert!(!free.take_at(start, length), "{start} {length}");
        }
        assert_eq!(free.take(0), None);
        assert!(free.give(10, 0) && free.take_at(150, 0));
        assert_eq!(free, whole);
    }

    proptest! {
        #[test]
        fn it_says_of_each_address_what_a_list_of_them_says(
            steps in proptest::collection::vec((0_u64..4, 0_u64..48, 0_u64..12), 1..200),
        ) {
            let mut free = FreeRanges::default();
            let mut model = [false; 64];
            for (step, start, length) in steps {
                let range = start as usize..(start + length) as usize;
                let all = |model: &[bool], value| model.iter().all(|free| *free == value);
                match step {
                    0 => {
                        let taken = free.take(length);
                        let lowest = (0..=64 - length as usize).find(|at| all(&model[*at..at + length as usize], true));
                        prop_assert_eq!(taken, lowest.filter(|_| length > 0).map(|at| at as u64));
                        if let Some(at) = taken {
                            model[at as usize..(at + length) as usize].fill(false);
                        }
                    }
                    1 if length > 0 => {
                        let expected = all(&model[range.clone()], true);
                        prop_assert_eq!(free.take_at(start, length), expected);
                        if expected {
                            model[range].fill(false);
                        }
                    }
                    _ => {
                        let expected = all(&model[range.clone()], false);
                        prop_assert_eq!(free.give(start, length), expected);
                        if expected {
                            model[range].fill(true);
                        }
                    }
                }
                let total = model.iter().filter(|free| **free).count() as u64;
                prop_assert_eq!((free.total(), free.parts().map(|(_, length)| length).sum()), (total, total));
                let starts = (0..64).filter(|at| model[*at] && (*at == 0 || !model[at - 1]));
                prop_assert!(free.parts().map(|(start, _)| start as usize).eq(starts));
            }
        }
    }
}

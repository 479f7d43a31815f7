//! How many workers of each kind to keep ready, learned from the workers that clients took lately.
//!
//! Workers that are taken within [`BURST`] of each other belong together: the processes of one application, or several
//! restores at once. A kind that was taken in two bursts is asked for again and again, so the pool keeps as many workers of
//! that kind as its largest burst took. Each worker costs memory of every GPU that it sees, therefore one burst teaches
//! nothing, all kinds together get `pool.learned` workers beyond `pool.spare`, and a burst is forgotten after `pool.remember_s`.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::kind::Kind;
use crate::config::Spares;

/// The longest time between the first and the last worker of one burst.
const BURST: Duration = Duration::from_secs(2);
/// The most bursts that are remembered of a kind.
const BURSTS_MAX: usize = 32;

/// The bursts in which workers of one kind were taken, oldest first.
#[derive(Debug, Default)]
pub(super) struct Bursts(VecDeque<Burst>);

#[derive(Clone, Copy, Debug)]
struct Burst {
    began: Instant,
    workers: usize,
}

impl Bursts {
    /// Counts a worker that is taken now.
    pub(super) fn count(&mut self, now: Instant) {
        match self.0.back_mut() {
            Some(last) if now.saturating_duration_since(last.began) <= BURST => last.workers += 1,
            _ => self.0.push_back(Burst { began: now, workers: 1 }),
        }
        if self.0.len() > BURSTS_MAX {
            self.0.pop_front();
        }
    }

    /// Forgets bursts that began before this time.
    pub(super) fn forget_before(&mut self, time: Instant) {
        self.0.retain(|burst| burst.began >= time);
    }

    /// When the oldest burst began.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.0.front().map(|burst| burst.began)
    }

    /// The workers that were taken.
    pub(super) fn workers(&self) -> usize {
        self.0.iter().map(|burst| burst.workers).sum()
    }

    /// The workers that the next burst will take if it is like the largest one. None if there was only one.
    fn next(&self) -> usize {
        if self.0.len() < 2 { 0 } else { self.0.iter().map(|burst| burst.workers).max().unwrap_or(0) }
    }
}

impl Spares {
    /// The workers of each kind to be kept ready. Kinds that were taken last come first. Kinds without any are left out.
    pub(super) fn targets<'a>(&self, kinds: impl Iterator<Item = (&'a Kind, &'a Bursts)>) -> BTreeMap<Kind, usize> {
        let mut targets = BTreeMap::from([(Kind::default(), self.usual)]);
        let mut by_time: Vec<_> =
            kinds.filter_map(|(kind, bursts)| Some((bursts.0.back()?.began, kind, bursts))).collect();
        by_time.sort_by_key(|(last, kind, _)| (std::cmp::Reverse(*last), *kind));
        let mut left = self.learned;
        for (_, kind, bursts) in by_time {
            let always = if kind.is_usual() { self.usual } else { 0 };
            let learned = bursts.next().saturating_sub(always).min(left);
            left -= learned;
            targets.insert(kind.clone(), always + learned);
        }
        targets.retain(|_, workers| *workers > 0);
        targets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn kind(gpu: u8) -> Kind {
        Kind::new(&Vec::new(), Some(&[[gpu; 16]]))
    }

    /// Bursts that began so many seconds after a common start, with so many workers each.
    fn bursts(start: Instant, all: &[(u32, usize)]) -> Bursts {
        let mut bursts = Bursts::default();
        for &(after, workers) in all {
            (0..workers).for_each(|_| bursts.count(start + after * SECOND));
        }
        bursts
    }

    fn targets(spares: Spares, kinds: &[(Kind, Bursts)]) -> Vec<(Kind, usize)> {
        spares.targets(kinds.iter().map(|(kind, bursts)| (kind, bursts))).into_iter().collect()
    }

    #[test]
    fn one_burst_teaches_nothing_and_two_teach_the_larger_one() {
        let now = Instant::now();
        let spares = Spares { usual: 1, learned: 8, remember: 60 * SECOND };
        let usual = || (Kind::default(), 1);
        let once = [(kind(1), bursts(now, &[(0, 4)]))];
        assert_eq!(targets(spares, &once), [usual()]);
        let twice = [(kind(1), bursts(now, &[(0, 4), (10, 1)]))];
        assert_eq!(targets(spares, &twice), [usual(), (kind(1), 4)]);
        // Workers that are taken within two seconds are of one burst.
        let close = [(kind(1), bursts(now, &[(0, 1), (1, 1), (2, 1)]))];
        assert_eq!((close[0].1.workers(), targets(spares, &close)), (3, vec![usual()]));
        let of_usual = [(Kind::default(), bursts(now, &[(0, 1), (10, 3)]))];
        assert_eq!(targets(spares, &of_usual), [(Kind::default(), 3)]);
    }

    #[test]
    fn kinds_that_were_taken_last_come_first_and_the_limit_holds() {
        let now = Instant::now();
        let kinds = [
            (kind(1), bursts(now, &[(0, 2), (10, 2)])),
            (kind(2), bursts(now, &[(0, 1), (20, 2)])),
            (Kind::default(), bursts(now, &[(0, 1), (5, 9)])),
        ];
        let of = |usual, learned| targets(Spares { usual, learned, remember: 60 * SECOND }, &kinds);
        assert_eq!(of(1, 3), [(Kind::default(), 1), (kind(1), 1), (kind(2), 2)]);
        assert_eq!(of(2, 5), [(Kind::default(), 3), (kind(1), 2), (kind(2), 2)]);
        assert_eq!(of(1, 0), [(Kind::default(), 1)]);
        assert_eq!(of(0, 0), []);
    }

    #[test]
    fn what_was_long_ago_is_forgotten() {
        let now = Instant::now();
        let mut seen = bursts(now, &[(0, 1), (10, 2), (20, 3)]);
        assert_eq!((seen.oldest(), seen.next()), (Some(now), 3));
        seen.forget_before(now + 15 * SECOND);
        assert_eq!((seen.oldest(), seen.next(), seen.workers()), (Some(now + 20 * SECOND), 0, 3));
        let many: Vec<_> = (0..100).map(|i| (i * 10, 1)).collect();
        assert_eq!(bursts(now, &many).workers(), BURSTS_MAX);
    }
}

//! Which programs are suspended so that another one gets memory: the least recently used idle ones, and only as many as needed.

use std::time::Duration;

/// A GPU, by its UUID.
pub(super) type Gpu = [u8; 16];

/// A program that may be suspended: a client, and all clients among its descendants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// How long all of its processes have been idle. Zero for a program that has work, or cannot be suspended.
    pub(super) idle: Duration,
    /// How long it must have been idle before it is suspended.
    pub(super) enough: Duration,
    /// Bytes that it gives back on each GPU.
    pub(super) memory: Vec<(Gpu, u64)>,
}

/// The programs to suspend, by their places in the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    Now(Vec<usize>),
    /// They are idle, and will have been for long enough after this time if they stay so.
    Later(Duration),
    /// All idle programs together have too little memory.
    Nobody,
}

/// Chooses programs that give back what is missing on the GPUs.
pub(super) fn choose(all: &[Candidate], missing: &[(Gpu, u64)]) -> Choice {
    if let Some(chosen) = least_recently_used(all, missing, |it| it.idle >= it.enough) {
        return Choice::Now(chosen);
    }
    let left = |place: usize| all.get(place).map_or(Duration::ZERO, |it| it.enough.saturating_sub(it.idle));
    match least_recently_used(all, missing, |_| true) {
        Some(chosen) => Choice::Later(chosen.into_iter().map(left).max().unwrap_or_default()),
        None => Choice::Nobody,
    }
}

/// The idle programs that may go and give back what is missing, the least recently used first; none if they have too little.
fn least_recently_used(
    all: &[Candidate],
    missing: &[(Gpu, u64)],
    may_go: impl Fn(&Candidate) -> bool,
) -> Option<Vec<usize>> {
    let mut order: Vec<_> = all.iter().enumerate().filter(|(_, it)| !it.idle.is_zero() && may_go(it)).collect();
    order.sort_by_key(|(_, it)| std::cmp::Reverse(it.idle));
    let mut chosen: Vec<(usize, &Candidate)> = Vec::new();
    for (place, candidate) in order {
        if lacks(&chosen, missing).any(|(gpu, _)| candidate.on(gpu) > 0) {
            chosen.push((place, candidate));
        }
    }
    if lacks(&chosen, missing).next().is_some() {
        return None;
    }
    // A program that was chosen first may be of no use beside a larger one that was used later.
    for at in (0..chosen.len()).rev() {
        let without = chosen.remove(at);
        if lacks(&chosen, missing).next().is_some() {
            chosen.insert(at, without);
        }
    }
    Some(chosen.into_iter().map(|(place, _)| place).collect())
}

/// What is still missing on each GPU when these programs are gone.
fn lacks(chosen: &[(usize, &Candidate)], missing: &[(Gpu, u64)]) -> impl Iterator<Item = (Gpu, u64)> {
    missing.iter().filter_map(|&(gpu, bytes)| {
        let given = chosen.iter().fold(0_u64, |sum, (_, it)| sum.saturating_add(it.on(gpu)));
        Some((gpu, bytes.checked_sub(given).filter(|left| *left > 0)?))
    })
}

impl Candidate {
    /// The bytes that it gives back on a GPU.
    fn on(&self, gpu: Gpu) -> u64 {
        self.memory.iter().filter(|(it, _)| *it == gpu).fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Gpu = [1; 16];
    const B: Gpu = [2; 16];

    fn idle(seconds: u64, memory: &[(Gpu, u64)]) -> Candidate {
        Candidate { idle: Duration::from_secs(seconds), enough: Duration::from_secs(10), memory: memory.to_vec() }
    }

    #[test]
    fn the_least_recently_used_goes_first_and_no_more_than_are_needed() {
        let all = [idle(20, &[(A, 5)]), idle(40, &[(A, 5)]), idle(30, &[(A, 5)])];
        assert_eq!(choose(&all, &[(A, 5)]), Choice::Now(vec![1]));
        assert_eq!(choose(&all, &[(A, 6)]), Choice::Now(vec![1, 2]));
        assert_eq!(choose(&all, &[(A, 15)]), Choice::Now(vec![1, 2, 0]));
        assert_eq!(choose(&all, &[(A, 16)]), Choice::Nobody);
    }

    #[test]
    fn a_program_goes_only_if_that_is_of_use() {
        let all = [idle(40, &[(B, 100)]), idle(30, &[(A, 1)]), idle(20, &[(A, 5)])];
        // The second would go first, and the third has enough by itself.
        assert_eq!(choose(&all, &[(A, 5)]), Choice::Now(vec![2]));
        assert_eq!(choose(&all, &[(A, 6)]), Choice::Now(vec![1, 2]));
        assert_eq!(choose(&all, &[(A, 5), (B, 1)]), Choice::Now(vec![0, 2]));
        assert_eq!(choose(&[], &[(A, 5)]), Choice::Nobody);
    }

    #[test]
    fn a_program_of_several_gpus_may_be_enough() {
        let all = [idle(40, &[(A, 5)]), idle(30, &[(A, 5), (B, 5)])];
        assert_eq!(choose(&all, &[(A, 5), (B, 5)]), Choice::Now(vec![1]));
    }

    #[test]
    fn a_busy_program_never_goes_and_one_that_was_just_used_goes_later() {
        let busy = idle(0, &[(A, 100)]);
        assert_eq!(choose(std::slice::from_ref(&busy), &[(A, 1)]), Choice::Nobody);
        let all = [busy, idle(4, &[(A, 5)]), idle(7, &[(A, 5)]), idle(12, &[(A, 1)])];
        assert_eq!(choose(&all, &[(A, 1)]), Choice::Now(vec![3]));
        assert_eq!(choose(&all, &[(A, 5)]), Choice::Later(Duration::from_secs(3)));
        assert_eq!(choose(&all, &[(A, 10)]), Choice::Later(Duration::from_secs(6)));
        assert_eq!(choose(&all, &[(A, 12)]), Choice::Nobody);
    }

    #[test]
    fn who_was_suspended_for_long_must_be_idle_for_long() {
        let slow = Candidate { enough: Duration::from_secs(50), ..idle(20, &[(A, 5)]) };
        assert_eq!(choose(&[slow.clone(), idle(15, &[(A, 5)])], &[(A, 5)]), Choice::Now(vec![1]));
        assert_eq!(choose(&[slow], &[(A, 5)]), Choice::Later(Duration::from_secs(30)));
    }
}

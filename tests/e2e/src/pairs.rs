//! Selects the cases of a matrix: all of them where tests may take long, otherwise few cases that still try every two
//! values together.

use std::collections::BTreeSet;
use std::fmt::Debug;

use crate::random::repetitions;

/// The cases to try: all with `REKINDLE_SOAK`, otherwise those of [`pairwise`].
pub fn cases<T: Clone, const N: usize>(all: &[T], values: impl Fn(&T) -> [&dyn Debug; N]) -> Vec<T> {
    if repetitions() > 1 { all.to_vec() } else { pairwise(all, values) }
}

/// Few cases of `all`, in the same order. Any two values of different factors that meet in a case of `all` meet in a
/// selected case. `values` gives a case's value for each factor; two values differ if their debug output differs.
///
/// The selection is greedy: it takes the first of the cases with the most pairs that no selected case has, until every
/// pair is covered.
pub fn pairwise<T: Clone, const N: usize>(all: &[T], values: impl Fn(&T) -> [&dyn Debug; N]) -> Vec<T> {
    let pairs: Vec<BTreeSet<Pair>> = all.iter().map(|case| pairs_of(values(case))).collect();
    let mut missing: BTreeSet<&Pair> = pairs.iter().flatten().collect();
    let mut chosen = BTreeSet::new();
    while !missing.is_empty() {
        let gain = |index: &usize| pairs[*index].iter().filter(|pair| missing.contains(pair)).count();
        // This takes the first of the best cases; `max_by_key` alone would take the last.
        let Some(best) = (0..all.len()).rev().max_by_key(gain) else { break };
        missing.retain(|pair| !pairs[best].contains(pair));
        chosen.insert(best);
    }
    chosen.into_iter().map(|index| all[index].clone()).collect()
}

/// Two factors and the value of each.
type Pair = ((usize, String), (usize, String));

fn pairs_of<const N: usize>(values: [&dyn Debug; N]) -> BTreeSet<Pair> {
    let values: Vec<_> = values.iter().enumerate().map(|(factor, value)| (factor, format!("{value:?}"))).collect();
    let behind = |(factor, first): (usize, &(usize, String))| {
        values[factor + 1..].iter().map(|second| (first.clone(), second.clone())).collect::<Vec<_>>()
    };
    values.iter().enumerate().flat_map(behind).collect()
}

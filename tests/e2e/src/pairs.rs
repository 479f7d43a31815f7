//! Selects the cases of a matrix: all of them where tests may take long, otherwise few cases that still try every two
//! values together.

use std::collections::BTreeSet;
use std::fmt::Debug;

use crate::random::repetitions;

/// The cases to try: all with `REKINDLE_SOAK`, otherwise those of [`pairwise`].
pub fn cases<T: Clone, const N: usize>(all: &[T], values: impl Fn(&T) -> [&dyn Debug; N]) -> Vec<T> {
    if repetitions() > 1 { all.to_vec() } else { pairwise(all, values) }
}

/// Fewer cases than [`cases`], for what takes long: all with `REKINDLE_SOAK`, otherwise those of [`each`].
pub fn few<T: Clone, const N: usize>(all: &[T], values: impl Fn(&T) -> [&dyn Debug; N]) -> Vec<T> {
    if repetitions() > 1 { all.to_vec() } else { each(all, values) }
}

/// Few cases of `all`, in the same order, in which each value of each factor is met. Chosen as by [`pairwise`].
pub fn each<T: Clone, const N: usize>(all: &[T], values: impl Fn(&T) -> [&dyn Debug; N]) -> Vec<T> {
    covering(all, &all.iter().map(|case| values_of(values(case))).collect::<Vec<_>>())
}

/// Few cases of `all`, in the same order. Any two values of different factors that meet in a case of `all` meet in a
/// selected case. `values` gives a case's value for each factor; two values differ if their debug output differs.
///
/// The selection is greedy: it takes the first of the cases with the most pairs that no selected case has, until every
/// pair is covered.
pub fn pairwise<T: Clone, const N: usize>(all: &[T], values: impl Fn(&T) -> [&dyn Debug; N]) -> Vec<T> {
    covering(all, &all.iter().map(|case| pairs_of(values(case))).collect::<Vec<_>>())
}

/// Cases that together have everything that the cases have.
fn covering<T: Clone, H: Ord>(all: &[T], have: &[BTreeSet<H>]) -> Vec<T> {
    let mut missing: BTreeSet<&H> = have.iter().flatten().collect();
    let mut chosen = BTreeSet::new();
    while !missing.is_empty() {
        let gain = |index: &usize| have[*index].iter().filter(|it| missing.contains(it)).count();
        // This takes the first of the best cases; `max_by_key` alone would take the last.
        let Some(best) = (0..all.len()).rev().max_by_key(gain) else { break };
        missing.retain(|it| !have[best].contains(it));
        chosen.insert(best);
    }
    chosen.into_iter().map(|index| all[index].clone()).collect()
}

/// A factor and its value.
type Value = (usize, String);
/// Two factors and the value of each.
type Pair = (Value, Value);

fn values_of<const N: usize>(values: [&dyn Debug; N]) -> BTreeSet<Value> {
    values.iter().enumerate().map(|(factor, value)| (factor, format!("{value:?}"))).collect()
}

fn pairs_of<const N: usize>(values: [&dyn Debug; N]) -> BTreeSet<Pair> {
    let values: Vec<_> = values_of(values).into_iter().collect();
    let behind = |(factor, first): (usize, &(usize, String))| {
        values[factor + 1..].iter().map(|second| (first.clone(), second.clone())).collect::<Vec<_>>()
    };
    values.iter().enumerate().flat_map(behind).collect()
}

//! Models of protocols: every order of steps and failures is tried.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt::Debug;
use std::hash::Hash;

/// What is modelled.
pub(crate) trait Model: Copy + Debug + Eq + Hash {
    /// The states after one step of a part that works.
    fn steps(self) -> Vec<Self>;
    /// The states after one failure.
    fn failures(self) -> Vec<Self>;
    /// What is wrong with this state, whatever comes.
    fn wrong(self) -> Option<&'static str>;
    /// Whether it may end like this.
    fn is_good_end(self) -> bool;
}

/// Tries everything. Returns the states, or what is wrong.
pub(crate) fn explore<M: Model>(start: M) -> Result<HashSet<M>, String> {
    let mut seen = HashSet::from([start]);
    let mut queue = VecDeque::from([start]);
    // For each state those from which one step without a failure leads to it.
    let mut before = HashMap::<M, Vec<M>>::new();
    while let Some(world) = queue.pop_front() {
        if let Some(wrong) = world.wrong() {
            return Err(format!("{wrong}: {world:?}"));
        }
        for next in world.steps() {
            before.entry(next).or_default().push(world);
            if seen.insert(next) {
                queue.push_back(next);
            }
        }
        for next in world.failures() {
            if seen.insert(next) {
                queue.push_back(next);
            }
        }
    }
    let mut good: HashSet<_> = seen.iter().copied().filter(|it| it.is_good_end()).collect();
    let mut queue: VecDeque<_> = good.iter().copied().collect();
    while let Some(world) = queue.pop_front() {
        for earlier in before.get(&world).into_iter().flatten() {
            if good.insert(*earlier) {
                queue.push_back(*earlier);
            }
        }
    }
    match seen.difference(&good).next() {
        Some(stuck) => Err(format!("leads nowhere: {stuck:?}")),
        None => Ok(seen),
    }
}

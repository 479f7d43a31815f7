//! Managed variables of the program's code: where they lie, and in which pages.
//!
//! ```text
//!   areas       [ one memfd    )[ another )                 pages, which begin and end where pages do
//!   variables     [ a )[ b )  [ c  )               a variable has all pages that it lies in; c has some of two areas
//! ```
//!
//! The driver places variables side by side, also those of several modules. So an area may have several variables, and it stays as
//! long as one of them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::types::*;

const PAGE: u64 = 4096;

/// A variable that the worker knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Variable {
    pub(crate) size: u64,
    /// The module or library.
    pub(crate) parent: u64,
    pub(crate) context: CUcontext,
}

/// What is gone.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Gone {
    /// The addresses of variables.
    pub(crate) variables: Vec<u64>,
    pub(crate) areas: Vec<Range<u64>>,
}

/// All managed variables, by address.
#[derive(Debug, Default)]
pub(crate) struct Known {
    variables: BTreeMap<u64, Variable>,
    areas: BTreeMap<u64, u64>,
}

/// All managed variables of the process.
#[derive(Debug, Default)]
pub(crate) struct Variables {
    known: Mutex<Known>,
    changing: Mutex<()>,
    /// Whether there are any: most programs have none, and each launch asks.
    any: AtomicBool,
}

impl Variables {
    /// Whoever holds this keeps others from finding variables and from unloading code that has any.
    pub(crate) fn change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known. Nobody holds this while the worker does something: each launch needs it.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Known> {
        // Each change leaves the maps valid.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there are any.
    pub(crate) fn has_any(&self) -> bool {
        self.any.load(Relaxed)
    }

    /// Adds a variable, and the area that it needs.
    pub(crate) fn add(&self, address: u64, variable: Variable, area: Range<u64>) {
        self.lock().add(address, variable, area);
        self.any.store(true, Relaxed);
    }

    /// Forgets variables, and the areas that have no others.
    pub(crate) fn forget(&self, which: impl Fn(&Variable) -> bool) -> Gone {
        let mut known = self.lock();
        let gone = known.forget(which);
        self.any.store(!known.variables.is_empty(), Relaxed);
        gone
    }
}

/// The pages that a range lies in.
fn pages(range: &Range<u64>) -> Range<u64> {
    range.start & !(PAGE - 1)..range.end.next_multiple_of(PAGE)
}

impl Known {
    /// The variable at an address.
    pub(crate) fn at(&self, address: u64) -> Option<Variable> {
        self.variables.get(&address).copied()
    }

    /// The context in which a module or library has variables.
    pub(crate) fn context_of(&self, parent: u64) -> Option<CUcontext> {
        self.variables.values().find(|it| it.parent == parent).map(|it| it.context)
    }

    /// How many areas there are.
    pub(crate) fn areas(&self) -> usize {
        self.areas.len()
    }

    /// The pages of a range that no area has: only the first and the last of them can lie in one, since variables do not overlap.
    /// Empty where areas have all of them.
    pub(crate) fn missing(&self, range: &Range<u64>) -> Range<u64> {
        let mut missing = pages(range);
        for (&start, &end) in self.areas.range(..missing.end).rev().take_while(|(_, end)| **end > pages(range).start) {
            if start <= missing.start {
                missing.start = missing.start.max(end);
            } else {
                missing.end = missing.end.min(start);
            }
        }
        if missing.is_empty() { missing.start..missing.start } else { missing }
    }

    fn add(&mut self, address: u64, variable: Variable, area: Range<u64>) {
        self.variables.insert(address, variable);
        if !area.is_empty() {
            self.areas.insert(area.start, area.end);
        }
    }

    fn forget(&mut self, which: impl Fn(&Variable) -> bool) -> Gone {
        let variables: Vec<u64> =
            self.variables.iter().filter(|(_, it)| which(it)).map(|(address, _)| *address).collect();
        self.variables.retain(|_, it| !which(it));
        let is_used = |area: &Range<u64>| {
            let last = self.variables.range(..area.end).next_back();
            last.is_some_and(|(address, it)| pages(&(*address..address + it.size)).end > area.start)
        };
        let all = self.areas.iter().map(|(start, end)| *start..*end);
        let areas: Vec<_> = all.filter(|area| !is_used(area)).collect();
        self.areas.retain(|start, _| areas.iter().all(|area| area.start != *start));
        Gone { variables, areas }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: u64 = 0x7fff_0000_0000;

    fn variable(size: u64, parent: u64) -> Variable {
        Variable { size, parent, context: 1 }
    }

    /// Adds a variable as the program does that finds it, and returns the pages that it needed.
    fn find(known: &mut Known, range: Range<u64>, parent: u64) -> Range<u64> {
        let missing = known.missing(&range);
        known.add(range.start, variable(range.end - range.start, parent), missing.clone());
        missing
    }

    #[test]
    fn a_variable_needs_the_pages_that_no_other_one_has() {
        let mut known = Known::default();
        assert_eq!(find(&mut known, AT + 100..AT + 104, 1), AT..AT + PAGE);
        assert!(find(&mut known, AT + 512..AT + 516, 2).is_empty());
        // From the page of these into those behind.
        assert_eq!(find(&mut known, AT + PAGE - 8..AT + 3 * PAGE + 1, 1), AT + PAGE..AT + 4 * PAGE);
        // Up to a page that another one has.
        assert_eq!(find(&mut known, AT - PAGE - 5..AT + 20, 3), AT - 2 * PAGE..AT);
        // Between the pages of two others.
        assert_eq!(find(&mut known, AT + 6 * PAGE..AT + 6 * PAGE + 4, 3), AT + 6 * PAGE..AT + 7 * PAGE);
        assert_eq!(find(&mut known, AT + 3 * PAGE + 8..AT + 6 * PAGE, 3), AT + 4 * PAGE..AT + 6 * PAGE);
        assert_eq!((known.areas(), known.at(AT + 100), known.at(AT + 101)), (5, Some(variable(4, 1)), None));
    }

    #[test]
    fn pages_stay_as_long_as_one_of_their_variables() {
        let mut known = Known::default();
        find(&mut known, AT..AT + 4, 1);
        find(&mut known, AT + 8..AT + 12, 2);
        find(&mut known, AT + 16..AT + 2 * PAGE, 1);
        assert_eq!((known.context_of(2), known.context_of(3)), (Some(1), None));
        let gone = known.forget(|it| it.parent == 1);
        assert_eq!((gone.variables, gone.areas.len()), (vec![AT, AT + 16], 1));
        assert_eq!(gone.areas.first(), Some(&(AT + PAGE..AT + 2 * PAGE)));
        let gone = known.forget(|it| it.context == 1);
        assert_eq!((gone.variables, gone.areas.len()), (vec![AT + 8], 1));
        assert_eq!(gone.areas.first(), Some(&(AT..AT + PAGE)));
        assert_eq!(known.forget(|_| true), Gone::default());
    }

    #[test]
    fn a_variable_that_begins_before_its_area_keeps_it() {
        let mut known = Known::default();
        find(&mut known, AT..AT + 4, 1);
        find(&mut known, AT + 8..AT + PAGE + 8, 2);
        find(&mut known, AT + PAGE + 16..AT + PAGE + 20, 3);
        assert_eq!(known.forget(|it| it.parent == 3).areas, []);
        assert_eq!(known.forget(|it| it.parent == 2).areas.first(), Some(&(AT + PAGE..AT + 2 * PAGE)));
    }
}

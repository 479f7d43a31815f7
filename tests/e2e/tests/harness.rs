//! The harness of these tests: the tests that run at the same time, and the cases of a matrix that are tried.

use std::collections::BTreeSet;
use std::fmt::Debug;

use rekindle_e2e::pairs::{each, pairwise};
use rekindle_e2e::schedule::Queue;

fn waiting(tickets: &[(u64, bool)]) -> Queue {
    let mut queue = Queue::new();
    queue.waiting.extend(tickets.iter().copied());
    queue
}

/// Starts all tests that may start, and returns their tickets.
fn started(queue: &mut Queue, limit: usize) -> Vec<u64> {
    std::iter::from_fn(|| queue.next(limit).inspect(|ticket| queue.starts(*ticket))).collect()
}

#[test]
fn no_more_tests_run_than_the_limit_and_the_first_that_asked_starts_first() {
    let mut queue = waiting(&[(3, false), (1, false), (2, false)]);
    assert_eq!(started(&mut queue, 2), [1, 2]);
    queue.running -= 1;
    assert_eq!(started(&mut queue, 2), [3]);
}

#[test]
fn a_test_that_waits_for_the_host_lock_lets_a_later_one_run() {
    let mut queue = waiting(&[(1, true), (2, true), (3, false), (4, true)]);
    assert_eq!(started(&mut queue, 2), [1, 3]);
    queue.running -= 1;
    assert_eq!(started(&mut queue, 2), [0; 0], "the host is in use");
    queue.host_in_use = false;
    assert_eq!(started(&mut queue, 2), [2]);
}

type Case = (u8, char, bool, u8);

fn matrix(holds: impl Fn(&Case) -> bool) -> Vec<Case> {
    let mut all = Vec::new();
    for a in 0..10 {
        for b in ['w', 'x', 'y', 'z'] {
            for c in [false, true] {
                all.extend((0..4).map(|d| (a, b, c, d)));
            }
        }
    }
    all.retain(holds);
    all
}

fn values(case: &Case) -> [&dyn Debug; 4] {
    [&case.0, &case.1, &case.2, &case.3]
}

/// Every two values that meet in a case, with their factors.
fn meetings(cases: &[Case]) -> BTreeSet<String> {
    let of_one = |case: &Case| {
        let values = values(case).map(|value| format!("{value:?}"));
        let mut met = Vec::new();
        for second in 0..values.len() {
            met.extend((0..second).map(|first| format!("{first}: {}, {second}: {}", values[first], values[second])));
        }
        met
    };
    cases.iter().flat_map(of_one).collect()
}

#[test]
fn every_two_values_of_a_matrix_meet_in_an_eighth_of_its_cases() {
    let all = matrix(|_| true);
    let chosen = pairwise(&all, values);
    assert_eq!(meetings(&chosen), meetings(&all));
    assert_eq!(all.len(), 320);
    assert!((40..=44).contains(&chosen.len()), "{}", chosen.len());
    assert!(chosen.is_sorted(), "in the order of the matrix");
}

#[test]
fn values_that_meet_in_no_case_of_a_matrix_are_not_asked_for() {
    let all = matrix(|case| case.0 < 5 || !case.2);
    let chosen = pairwise(&all, values);
    assert_eq!(meetings(&chosen), meetings(&all));
    assert!(chosen.iter().all(|case| all.contains(case)));
}

#[test]
fn equal_values_of_two_factors_are_two_values() {
    let all = [(1, 1), (1, 2), (2, 1), (2, 2)];
    assert_eq!(pairwise(&all, |case| [&case.0, &case.1]), all);
    assert_eq!(pairwise(&[(); 0], |_| [&0, &0]), []);
}

#[test]
fn each_value_of_a_matrix_is_met_in_few_of_its_cases() {
    let all = matrix(|_| true);
    let chosen = each(&all, values);
    let of_one =
        |case: &Case| values(case).into_iter().map(|value| format!("{value:?}")).enumerate().collect::<Vec<_>>();
    let met = |cases: &[Case]| cases.iter().flat_map(of_one).collect::<BTreeSet<_>>();
    assert_eq!(met(&chosen), met(&all));
    assert!(chosen.len() <= 10 && chosen.is_sorted(), "{chosen:?}");
}

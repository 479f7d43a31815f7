//! Which tests run beside each other.

use rekindle_e2e::schedule::Queue;

fn waiting(tickets: &[(u64, bool)]) -> Queue {
    let mut queue = Queue::new();
    queue.waiting.extend(tickets.iter().copied());
    queue
}

/// Starts all that may start, and says which.
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

//! Which deeply suspended clients need a worker, and why they have none yet.
//!
//! ```text
//!   a keeper says NeedsRoom ──want──► wanted ──next──► under way ──over──► gone: the client has its worker
//!                               ▲                                  └─────► failed, and why ──┐ after a pause
//!                               └────────────────────────────────────────────────────────────┘
//! ```
//!
//! A keeper asks again and again, so nothing here remembers to try again. `suspend/moved.rs` does the moves.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use super::process::Process;
use super::{lock, wait};

/// The pause after an attempt for which a worker was started.
const SOON: Duration = Duration::from_secs(5);
/// The pause after an attempt that failed otherwise, which doubles with each.
const PAUSE: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The clients that need a worker.
#[derive(Default)]
pub(crate) struct Moves {
    clients: Mutex<HashMap<Process, Move>>,
    changed: Condvar,
}

/// What is known of one client.
#[derive(Debug)]
struct Move {
    step: Step,
    failures: u32,
    /// Why the last attempt has failed.
    why: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Wanted,
    UnderWay,
    /// The next attempt begins at this time at the earliest.
    Failed {
        again: Instant,
    },
}

/// Why an attempt has failed.
pub(crate) struct Failed {
    pub(crate) why: String,
    pub(crate) again: Again,
}

/// When the next attempt may follow: that depends on what one costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Again {
    /// It has cost next to nothing.
    AtOnce,
    /// A worker was started for it, only to see that there is no room.
    Soon,
    /// It has failed for a reason that is likely to stay.
    Later,
}

impl Moves {
    /// A client needs a worker. Nothing happens if it has failed to get one just before.
    pub(crate) fn want(&self, client: Process) {
        let mut clients = lock(&self.clients);
        let it = clients.entry(client).or_insert(Move {
            step: Step::Failed { again: Instant::now() },
            failures: 0,
            why: None,
        });
        if matches!(it.step, Step::Failed { again } if Instant::now() >= again) {
            it.step = Step::Wanted;
            drop(clients);
            self.changed.notify_all();
        }
    }

    /// Waits for a client that needs a worker. Its move is under way from here on.
    pub(crate) fn next(&self) -> Process {
        let mut clients = lock(&self.clients);
        loop {
            clients.retain(|process, it| it.step == Step::UnderWay || process.is_alive());
            if let Some((process, it)) = clients.iter_mut().find(|(_, it)| it.step == Step::Wanted) {
                it.step = Step::UnderWay;
                return *process;
            }
            clients = wait(&self.changed, clients);
        }
    }

    /// The move of a client is over.
    pub(crate) fn over(&self, client: Process, failed: Option<Failed>) {
        let mut clients = lock(&self.clients);
        let Some(Failed { why, again }) = failed else {
            clients.remove(&client);
            return;
        };
        if let Some(it) = clients.get_mut(&client) {
            it.failures = if again == Again::Later { it.failures.saturating_add(1) } else { 0 };
            it.why = Some(why);
            let pause = match again {
                Again::AtOnce => Duration::ZERO,
                Again::Soon => SOON,
                Again::Later => PAUSE.saturating_mul(1 << it.failures.min(10)).min(PAUSE_MAX),
            };
            it.step = Step::Failed { again: Instant::now() + pause };
        }
    }

    /// Why the last attempt for a client has failed.
    pub(crate) fn why(&self, client: Process) -> Option<String> {
        lock(&self.clients).get(&client)?.why.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Process {
        Process::with_pid(std::process::id() as i32).unwrap()
    }

    fn failed(again: Again) -> Option<Failed> {
        Some(Failed { why: "no".to_owned(), again })
    }

    #[test]
    fn a_client_is_moved_once_at_a_time_and_not_at_once_again_after_a_failure() {
        let moves = Moves::default();
        moves.want(own());
        assert_eq!(moves.next(), own());
        // It asks again and again.
        moves.want(own());
        assert_eq!(lock(&moves.clients)[&own()].step, Step::UnderWay);
        for (again, failures) in [(Again::Later, 1), (Again::Later, 2), (Again::Soon, 0)] {
            moves.over(own(), failed(again));
            assert_eq!(moves.why(own()).as_deref(), Some("no"));
            moves.want(own());
            assert_eq!(lock(&moves.clients)[&own()].failures, failures);
            assert!(matches!(lock(&moves.clients)[&own()].step, Step::Failed { .. }));
        }
        moves.over(own(), failed(Again::AtOnce));
        moves.want(own());
        assert_eq!((moves.next(), moves.why(own()).as_deref()), (own(), Some("no")));
        moves.over(own(), None);
        assert!(moves.why(own()).is_none() && lock(&moves.clients).is_empty());
    }

    #[test]
    fn a_process_that_is_gone_needs_no_worker() {
        let moves = Moves::default();
        moves.want(Process { start: own().start + 1, ..own() });
        moves.want(own());
        assert_eq!(moves.next(), own());
    }
}

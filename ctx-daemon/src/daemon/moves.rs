//! Which deeply suspended clients need a worker, and why they have none yet.
//!
//! ```text
//!   a keeper says NeedsRoom ──want──► wanted ──next──► under way ──over──► gone: the client has its worker
//!                                                                   └─────► failed, and why; wanted again at the earliest ...
//! ```
//!
//! A keeper asks again and again, so nothing here remembers to try again. `suspend/moved.rs` does the moves.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use super::process::Process;
use super::{lock, wait};

/// The pause after a failed attempt, which doubles with each.
const PAUSE: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The clients that need a worker.
#[derive(Default)]
pub(crate) struct Moves {
    clients: Mutex<HashMap<Process, Move>>,
    changed: Condvar,
}

/// The state of one client.
#[derive(Clone, Debug)]
enum Move {
    Wanted { failures: u32 },
    UnderWay { failures: u32 },
    Failed { failures: u32, again: Instant, why: String },
}

/// Why an attempt has failed.
pub(crate) struct Failed {
    pub(crate) why: String,
    /// Whether the next attempt may follow soon: this one has cost little.
    pub(crate) was_cheap: bool,
}

impl Moves {
    /// A client needs a worker. Nothing happens if it has failed to get one just before.
    pub(crate) fn want(&self, client: Process) {
        let mut clients = lock(&self.clients);
        let failures = match clients.get(&client) {
            None => 0,
            Some(Move::Failed { failures, again, .. }) if Instant::now() >= *again => *failures,
            Some(_) => return,
        };
        clients.insert(client, Move::Wanted { failures });
        drop(clients);
        self.changed.notify_all();
    }

    /// Waits for a client that needs a worker. Its move is under way from here on.
    pub(crate) fn next(&self) -> Process {
        let mut clients = lock(&self.clients);
        loop {
            clients.retain(|process, it| matches!(it, Move::UnderWay { .. }) || process.is_alive());
            if let Some((process, it)) = clients.iter_mut().find(|(_, it)| matches!(it, Move::Wanted { .. })) {
                *it = Move::UnderWay { failures: it.failures() };
                return *process;
            }
            clients = wait(&self.changed, clients);
        }
    }

    /// The move of a client is over.
    pub(crate) fn over(&self, client: Process, failed: Option<Failed>) {
        let mut clients = lock(&self.clients);
        let Some(Failed { why, was_cheap }) = failed else {
            clients.remove(&client);
            return;
        };
        let failures = if was_cheap { 0 } else { clients.get(&client).map_or(0, Move::failures).saturating_add(1) };
        let pause = PAUSE.saturating_mul(1 << failures.min(10)).min(PAUSE_MAX);
        let again = Instant::now() + if was_cheap { Duration::ZERO } else { pause };
        clients.insert(client, Move::Failed { failures, again, why });
    }

    /// Why the last attempt for a client has failed.
    pub(crate) fn why(&self, client: Process) -> Option<String> {
        match lock(&self.clients).get(&client) {
            Some(Move::Failed { why, .. }) => Some(why.clone()),
            _ => None,
        }
    }
}

impl Move {
    fn failures(&self) -> u32 {
        match self {
            Self::Wanted { failures } | Self::UnderWay { failures } | Self::Failed { failures, .. } => *failures,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Process {
        Process::with_pid(std::process::id() as i32).unwrap()
    }

    fn failed(was_cheap: bool) -> Option<Failed> {
        Some(Failed { why: "no".to_owned(), was_cheap })
    }

    #[test]
    fn a_client_is_moved_once_at_a_time_and_not_at_once_again_after_a_failure() {
        let moves = Moves::default();
        moves.want(own());
        assert_eq!(moves.next(), own());
        // It asks again and again.
        moves.want(own());
        assert!(!lock(&moves.clients).values().any(|it| matches!(it, Move::Wanted { .. })));
        moves.over(own(), failed(false));
        assert_eq!(moves.why(own()).as_deref(), Some("no"));
        moves.want(own());
        assert!(matches!(lock(&moves.clients)[&own()], Move::Failed { failures: 1, .. }));
        moves.over(own(), failed(true));
        moves.want(own());
        assert_eq!(moves.next(), own());
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

//! Device memory for a client that finds none: the daemon says whether clones of other clients will give some back.
//!
//! The worker waits a limited time: on a shared GPU a program must expect to find no memory, and meanwhile the worker
//! neither executes commands nor answers the daemon.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The longest time that the worker waits for the daemon's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause between two attempts to allocate, and the longest time that the worker tries.
const PAUSE: Duration = Duration::from_millis(5);
const MOST: Duration = Duration::from_secs(5);

/// The daemon's latest answer, see `daemon/memory_pressure.rs`.
#[derive(Default)]
pub(crate) struct MemoryPressure {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// The daemon has said nothing, or that no memory is coming.
    #[default]
    Nothing,
    Asked,
    Coming {
        since: Instant,
    },
}

impl MemoryPressure {
    /// The daemon says whether memory is coming, whether or not it was asked. A daemon that is gone says that none is
    /// coming.
    pub(crate) fn said(&self, coming: bool) {
        let mut state = self.lock();
        *state = if coming { State::Coming { since: Instant::now() } } else { State::Nothing };
        drop(state);
        self.changed.notify_all();
    }

    /// Whether a command is to try again, after a moment. Before the first attempt `ask` asks the daemon.
    pub(crate) fn wait(&self, first: bool, ask: impl FnOnce()) -> bool {
        if first {
            *self.lock() = State::Asked;
            ask();
            let asked = |state: &mut State| *state == State::Asked;
            let waited = self.changed.wait_timeout_while(self.lock(), ANSWER_TIMEOUT, asked);
            let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if *state == State::Asked {
                *state = State::Nothing;
            }
            return *state != State::Nothing;
        }
        match *self.lock() {
            State::Coming { since } if since.elapsed() < MOST => {}
            _ => return false,
        }
        // The command tries once more even if the daemon says meanwhile that no more is coming: the last memory came before
        // that.
        drop(self.changed.wait_timeout(self.lock(), PAUSE));
        true
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_asks_and_tries_until_none_is_coming() {
        let room = MemoryPressure::default();
        assert!(!room.wait(true, || room.said(false)));
        let ask = || panic!("it has asked");
        assert!(!room.wait(false, ask));
        assert!(room.wait(true, || room.said(true)));
        assert!(room.wait(false, ask));
        assert!(room.wait(false, ask));
        room.said(false);
        assert!(!room.wait(false, ask));
        // An answer to an earlier command counts no more.
        assert!(room.wait(true, || room.said(true)));
        assert!(!room.wait(true, || room.said(false)));
    }

    #[test]
    fn it_is_not_tried_for_ever() {
        let room = MemoryPressure::default();
        let long_ago = Instant::now().checked_sub(MOST).unwrap();
        *room.lock() = State::Coming { since: long_ago };
        assert!(!room.wait(false, || ()));
    }
}

//! The client finds no device memory: whether some is coming that others' clones take. The daemon knows.
//!
//! It is waited for only so long: on a GPU that others use too a program must expect to find no memory, and meanwhile none
//! of its commands is executed, nor does its worker answer the daemon.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the daemon may take to say.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often it is tried again meanwhile, and for how long.
const PAUSE: Duration = Duration::from_millis(5);
const MOST: Duration = Duration::from_secs(5);

/// What the daemon has said, see `daemon/room.rs`.
#[derive(Default)]
pub(crate) struct OthersRoom {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Nothing, or that none is coming.
    #[default]
    Nothing,
    Asked,
    Coming {
        since: Instant,
    },
}

impl OthersRoom {
    /// The daemon says whether there is memory coming, asked or not; one that is gone says that there is none.
    pub(crate) fn said(&self, coming: bool) {
        let mut state = self.lock();
        *state = if coming { State::Coming { since: Instant::now() } } else { State::Nothing };
        drop(state);
        self.changed.notify_all();
    }

    /// Whether a command is to try again, after a moment. Before its first time `ask` has the daemon say.
    pub(crate) fn wait(&self, first: bool, ask: impl FnOnce()) -> bool {
        if first {
            *self.lock() = State::Asked;
            ask();
            let asked = |state: &mut State| *state == State::Asked;
            let waited = self.changed.wait_timeout_while(self.lock(), PATIENCE, asked);
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
        // Once more also where it is over now: that was what it was over with.
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
        let room = OthersRoom::default();
        assert!(!room.wait(true, || room.said(false)));
        let ask = || panic!("it has asked");
        assert!(!room.wait(false, ask));
        assert!(room.wait(true, || room.said(true)));
        assert!(room.wait(false, ask));
        assert!(room.wait(false, ask));
        room.said(false);
        assert!(!room.wait(false, ask));
        // What was said to another command counts no more.
        assert!(room.wait(true, || room.said(true)));
        assert!(!room.wait(true, || room.said(false)));
    }

    #[test]
    fn it_is_not_tried_for_ever() {
        let room = OthersRoom::default();
        let long_ago = Instant::now().checked_sub(MOST).unwrap();
        *room.lock() = State::Coming { since: long_ago };
        assert!(!room.wait(false, || ()));
    }
}

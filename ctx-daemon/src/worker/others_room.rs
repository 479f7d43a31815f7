//! The client finds no device memory: whether some is coming that others' clones take. The daemon knows.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long the daemon may take to say.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often it is tried again meanwhile.
const PAUSE: Duration = Duration::from_millis(5);

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
    Coming,
}

impl OthersRoom {
    /// The daemon says whether there is memory coming, asked or not; one that is gone says that there is none.
    pub(super) fn said(&self, coming: bool) {
        *self.lock() = if coming { State::Coming } else { State::Nothing };
        self.changed.notify_all();
    }

    /// Whether to try again, after a moment. `ask` has the daemon say.
    pub(super) fn wait(&self, ask: impl FnOnce()) -> bool {
        let mut state = self.lock();
        if *state == State::Coming {
            let waited = self.changed.wait_timeout(state, PAUSE);
            // Once more also where it is over: that was what it was over with.
            drop(waited);
            return true;
        }
        *state = State::Asked;
        drop(state);
        ask();
        let waited = self.changed.wait_timeout_while(self.lock(), PATIENCE, |state| *state == State::Asked);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *state == State::Asked {
            *state = State::Nothing;
        }
        *state == State::Coming
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_tried_again_until_none_is_coming_and_once_more() {
        let room = OthersRoom::default();
        assert!(!room.wait(|| room.said(false)));
        assert!(room.wait(|| room.said(true)));
        let ask = || panic!("it has said so");
        assert!(room.wait(ask));
        std::thread::scope(|scope| {
            scope.spawn(|| room.said(false));
            while *room.lock() == State::Coming {
                assert!(room.wait(|| room.said(false)) || *room.lock() == State::Nothing);
            }
        });
        assert!(!room.wait(|| room.said(false)));
    }
}

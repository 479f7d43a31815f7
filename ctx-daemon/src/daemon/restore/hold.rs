//! A restore whose processes wait, complete, until a command says that they may run: they may go on elsewhere instead.
//!
//! | from | to | a hold |
//! |---|---|---|
//! | `Free` | `Wanted` | a command holds the restore that begins |
//! | `Wanted` | `Held` | the processes are complete, and all their memory is loaded |
//! | `Held` | `Owned` | the command says `Own`: the processes run |
//! | `Wanted` | `Abandoned` | the command has ended: the restore fails |
//! | `Held` | `Abandoned` | the same |

use std::sync::{Condvar, Mutex, OnceLock};
use std::time::Duration;

use rekindle_ctx_worker::transition::{self, machine};

use super::super::{lock, wait_timeout};

/// The pause between two looks whether CRIU, which waits, still lives.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The hold of a restore.
#[derive(Debug, Default)]
pub(super) struct Hold {
    /// The migration whose processes they are.
    migration: OnceLock<String>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Free,
    Wanted,
    Held,
    Owned,
    Abandoned,
}

machine! {
    enum StateName names State { Free, Wanted, Held, Owned, Abandoned }
    Free -> Wanted,
    Wanted -> Held,
    Held -> Owned,
    Wanted -> Abandoned,
    Held -> Abandoned,
}

/// The processes may not run: the command that held them has ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Abandoned;

impl Hold {
    /// A command holds the restore, which has not begun, for this migration.
    pub(super) fn want(&self, migration: &str) {
        // The first one counts.
        let _ = self.migration.set(migration.to_owned());
        self.change(|state| matches!(state, State::Free).then_some(State::Wanted));
    }

    /// The migration for which a command holds the restore, if one does.
    pub(super) fn migration(&self) -> Option<&str> {
        self.migration.get().map(String::as_str)
    }

    /// Whether the processes wait for the command.
    pub(super) fn holds(&self) -> bool {
        matches!(*lock(&self.state), State::Held)
    }

    /// The command says that the processes may run. Returns whether they have waited for that.
    pub(super) fn own(&self) -> bool {
        self.change(|state| matches!(state, State::Held).then_some(State::Owned))
    }

    /// The command has ended.
    pub(super) fn abandon(&self) {
        self.change(|state| matches!(state, State::Wanted | State::Held).then_some(State::Abandoned));
    }

    /// The processes are complete: waits until they may run, if a command holds them. `goes_on` fails when nobody waits for them any
    /// more.
    pub(super) fn wait<E: From<Abandoned>>(&self, mut goes_on: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        self.change(|state| matches!(state, State::Wanted).then_some(State::Held));
        let mut state = lock(&self.state);
        loop {
            match *state {
                State::Free | State::Owned => return Ok(()),
                State::Abandoned => return Err(Abandoned.into()),
                State::Wanted | State::Held => {}
            }
            state = wait_timeout(&self.changed, state, POLL_INTERVAL);
            goes_on()?;
        }
    }

    fn change(&self, next: impl FnOnce(&State) -> Option<State>) -> bool {
        let mut state = lock(&self.state);
        let Some(next) = next(&state) else { return false };
        transition::replace(&"the hold of a restore", &mut *state, next);
        self.changed.notify_all();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(hold: &Hold) -> Result<(), Abandoned> {
        hold.wait(|| Ok(()))
    }

    #[test]
    fn the_table_above_is_the_list_of_transitions() {
        assert_eq!(transition::table(include_str!("hold.rs"), "a hold"), transition::list::<StateName>());
    }

    #[test]
    fn processes_wait_until_they_are_owned_and_only_then() {
        assert_eq!(waits(&Hold::default()), Ok(()));
        let hold = Hold::default();
        hold.want("a");
        assert!(!hold.own(), "nothing is complete yet");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| waits(&hold));
            while !hold.holds() {
                std::thread::yield_now();
            }
            assert!(!waiting.is_finished());
            assert!(hold.own());
            assert_eq!(waiting.join().unwrap(), Ok(()));
        });
        hold.abandon();
        assert_eq!(waits(&hold), Ok(()), "what runs goes on");
    }

    #[test]
    fn processes_do_not_run_when_their_command_has_ended_or_their_criu() {
        let hold = Hold::default();
        hold.want("a");
        hold.abandon();
        assert_eq!(waits(&hold), Err(Abandoned));
        assert!(!hold.own());
        let hold = Hold::default();
        hold.want("a");
        assert_eq!(hold.wait(|| Err(Abandoned)), Err(Abandoned));
    }
}

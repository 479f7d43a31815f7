//! A restore whose processes wait, complete, until a command says that they may run: they may go on elsewhere instead.
//!
//! | from | to | a hold |
//! |---|---|---|
//! | `Free` | `Wanted` | a command holds the restore that begins |
//! | `Wanted` | `Held` | the processes are complete, and all their memory is loaded |
//! | `Held` | `Owned` | the command says `Own`: the processes run |
//! | `Wanted` | `Abandoned` | the command has ended: the restore fails |
//! | `Held` | `Abandoned` | the same |

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::sync::{Condvar, Mutex, OnceLock};
use std::time::Duration;

use rekindle_ctx_worker::transition::{self, machine};
use rekindle_wire::control::HELD_FILE;
use rustix::fs::{Mode, OFlags};
use thiserror::Error;

use super::super::{lock, wait_timeout};

/// The pause between two looks whether CRIU, which waits, still lives.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The hold of a restore.
#[derive(Debug, Default)]
pub(super) struct Hold {
    /// The migration whose processes they are, and whether they may run here again.
    migration: OnceLock<(String, bool)>,
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

/// Why an image that has come from another host is not restored.
#[derive(Debug, Error)]
pub(in crate::daemon) enum NotHeld {
    #[error(
        "its processes may go on at the host that they come from, and no command holds them here until that is decided: `rekindle \
         migrate --settle {0} HOST` on that host, with this host as HOST, restores them if they are this host's"
    )]
    By(String),
    #[error("cannot read {HELD_FILE} of the image: {0}")]
    Io(io::Error),
}

/// Fails if an image is that of a migration, and no command holds the restore for that. The command that has started CRIU may have been
/// killed before CRIU has asked for anything, and nobody else would keep the processes from running.
pub(super) fn check(dir: impl AsFd, hold: &Hold) -> Result<(), NotHeld> {
    const LONGEST: u64 = 64;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = match rustix::fs::openat(dir, HELD_FILE, flags, Mode::empty()) {
        Ok(opened) => File::from(opened),
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        Err(error) => return Err(NotHeld::Io(error.into())),
    };
    let mut name = String::new();
    opened.take(LONGEST).read_to_string(&mut name).map_err(NotHeld::Io)?;
    match hold.migration() {
        Some((migration, _)) if migration == name => Ok(()),
        _ => Err(NotHeld::By(name)),
    }
}

impl Hold {
    /// A command holds the restore, which has not begun, for this migration, whose processes may run here `again`.
    pub(super) fn want(&self, migration: &str, again: bool) {
        // The first one counts.
        let _ = self.migration.set((migration.to_owned(), again));
        self.change(|state| matches!(state, State::Free).then_some(State::Wanted));
    }

    /// The migration for which a command holds the restore, if one does, and whether its processes may run here again.
    pub(super) fn migration(&self) -> Option<(&str, bool)> {
        self.migration.get().map(|(migration, again)| (migration.as_str(), *again))
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
        hold.want("a", false);
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
    fn an_image_of_a_migration_is_restored_only_by_whom_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let opened = || File::open(dir.path()).unwrap();
        check(opened(), &Hold::default()).unwrap();
        std::fs::write(dir.path().join(HELD_FILE), "a").unwrap();
        assert!(check(opened(), &Hold::default()).is_err());
        for (migration, is_held) in [("a", true), ("b", false)] {
            let hold = Hold::default();
            hold.want(migration, false);
            assert_eq!(check(opened(), &hold).is_ok(), is_held, "{migration}");
        }
    }

    #[test]
    fn processes_do_not_run_when_their_command_has_ended_or_their_criu() {
        let hold = Hold::default();
        hold.want("a", false);
        hold.abandon();
        assert_eq!(waits(&hold), Err(Abandoned));
        assert!(!hold.own());
        let hold = Hold::default();
        hold.want("a", false);
        assert_eq!(hold.wait(|| Err(Abandoned)), Err(Abandoned));
    }
}

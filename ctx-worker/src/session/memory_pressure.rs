//! Device memory for a client that finds none: the daemon says whether clones of other clients will give some back, or makes
//! room by suspending idle clients.
//!
//! ```text
//!   Asked ──coming───────────────> Coming: tries again and again ──not coming──> Nothing: tries once more
//!     │ ──coming, how much?──> Making: waits ──not coming─────────────────────> Nothing: tries once more
//!     └──not coming──> Nothing         └───────room was made─────> Made: tries, and asks again if that is not enough
//! ```
//!
//! The worker waits a limited time: on a shared GPU a program must expect to find no memory, and meanwhile the worker
//! neither executes commands nor answers the daemon.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The longest time that the worker waits for the daemon's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause between two attempts to allocate, and the longest time that the worker tries. A daemon that makes room repeats
/// more often than that that it does.
const PAUSE: Duration = Duration::from_millis(5);
const MOST: Duration = Duration::from_secs(5);
/// How often one command asks: as a rule, room that was made is enough.
const MOST_ASKED: u32 = 32;
/// How often a suspended client that is to resume asks for room.
const ASK_INTERVAL: Duration = Duration::from_millis(500);

/// What the daemon says about memory: its `Room` message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) coming: bool,
    pub(crate) how_much: bool,
    pub(crate) again: bool,
}

/// The daemon's latest answer, see `daemon/memory_pressure.rs` and `daemon/oversubscribe`.
#[derive(Default)]
pub(crate) struct MemoryPressure {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    state: State,
    /// How often the command under way has asked, and when first.
    asked: u32,
    since: Option<Instant>,
    /// When a suspended client has asked last.
    asked_beside: Option<Instant>,
    /// Bytes that must be free on each device, as of the last time that the daemon was asked.
    needs: Vec<u64>,
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
    /// The daemon makes room, or looks for it.
    Making {
        since: Instant,
    },
    /// The daemon has made room.
    Made,
}

impl MemoryPressure {
    /// The daemon says whether memory is coming, whether or not it was asked. A daemon that is gone says that none is
    /// coming. Where the daemon wants to know, returns the bytes that must be free, and for how long the command has waited.
    pub(crate) fn said(&self, room: Room) -> Option<(Vec<u64>, Duration)> {
        let mut inner = self.lock();
        let since = Instant::now();
        inner.state = match (room, inner.state) {
            (Room { coming: true, how_much: true, .. }, _) | (Room { coming: true, .. }, State::Making { .. }) => {
                State::Making { since }
            }
            (Room { coming: true, .. }, _) => State::Coming { since },
            (Room { again: true, .. }, _) => State::Made,
            _ => State::Nothing,
        };
        let needs = room.how_much.then(|| (inner.needs.clone(), inner.since.map_or(Duration::ZERO, |it| it.elapsed())));
        drop(inner);
        self.changed.notify_all();
        needs
    }

    /// Whether a command is to try again, after a moment. Before the first attempt `ask` asks the daemon; `needs` are the bytes
    /// that must be free on each device.
    pub(crate) fn wait(&self, first: bool, needs: impl FnOnce() -> Vec<u64>, ask: impl FnOnce()) -> bool {
        let mut inner = self.lock();
        if first {
            inner.asked = 0;
            inner.since = Some(Instant::now());
        }
        // The room that was made was not enough, or others have taken it.
        let again = inner.state == State::Made && inner.asked < MOST_ASKED;
        if first || again {
            inner.asked += 1;
            inner.needs = needs();
            inner.state = State::Asked;
            drop(inner);
            ask();
            let asked = |inner: &mut Inner| inner.state == State::Asked;
            let waited = self.changed.wait_timeout_while(self.lock(), ANSWER_TIMEOUT, asked);
            (inner, _) = waited.unwrap_or_else(PoisonError::into_inner);
            match inner.state {
                State::Asked | State::Nothing => {
                    inner.state = State::Nothing;
                    return false;
                }
                State::Coming { .. } | State::Made => return true,
                State::Making { .. } => {}
            }
        }
        loop {
            match inner.state {
                State::Coming { since } if since.elapsed() < MOST => {
                    // The command tries once more even if the daemon says meanwhile that no more is coming: the last memory came
                    // before that.
                    drop(self.changed.wait_timeout(inner, PAUSE));
                    return true;
                }
                State::Making { since } if since.elapsed() < MOST => {
                    let left = MOST.saturating_sub(since.elapsed());
                    let waited = self.changed.wait_timeout(inner, left);
                    (inner, _) = waited.unwrap_or_else(PoisonError::into_inner);
                    if matches!(inner.state, State::Nothing | State::Made) {
                        return true;
                    }
                }
                _ => {
                    inner.state = State::Nothing;
                    return false;
                }
            }
        }
    }

    /// A suspended client that is to resume finds no room: now and then `ask` asks the daemon. Does not wait for an answer.
    pub(crate) fn ask_beside(&self, needs: Vec<u64>, ask: impl FnOnce()) {
        let mut inner = self.lock();
        if inner.asked_beside.is_some_and(|asked| asked.elapsed() < ASK_INTERVAL) {
            return;
        }
        inner.asked_beside = Some(Instant::now());
        inner.since = None;
        inner.needs = needs;
        drop(inner);
        ask();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use super::*;

    const NO: Room = Room { coming: false, how_much: false, again: false };
    const CLONES: Room = Room { coming: true, how_much: false, again: false };
    const LOOKS: Room = Room { coming: true, how_much: true, again: false };
    const MADE: Room = Room { coming: false, how_much: false, again: true };

    fn says(pressure: &MemoryPressure, room: Room) {
        assert_eq!(pressure.said(room), None);
    }

    fn asks_nothing() {
        panic!("it has asked");
    }

    #[test]
    fn each_command_asks_and_tries_until_none_is_coming() {
        let room = MemoryPressure::default();
        assert!(!room.wait(true, Vec::new, || says(&room, NO)));
        assert!(!room.wait(false, Vec::new, asks_nothing));
        assert!(room.wait(true, Vec::new, || says(&room, CLONES)));
        assert!(room.wait(false, Vec::new, asks_nothing));
        assert!(room.wait(false, Vec::new, asks_nothing));
        says(&room, NO);
        assert!(!room.wait(false, Vec::new, asks_nothing));
        // An answer to an earlier command counts no more.
        assert!(room.wait(true, Vec::new, || says(&room, CLONES)));
        assert!(!room.wait(true, Vec::new, || says(&room, NO)));
    }

    #[test]
    fn it_is_not_tried_for_ever() {
        let room = MemoryPressure::default();
        let since = Instant::now().checked_sub(MOST).unwrap();
        for state in [State::Coming { since }, State::Making { since }] {
            room.lock().state = state;
            assert!(!room.wait(false, Vec::new, asks_nothing));
        }
    }

    #[test]
    fn a_command_waits_while_the_daemon_makes_room_and_asks_again_if_that_is_not_enough() {
        let room = Arc::new(MemoryPressure::default());
        let told = Cell::new(None);
        let daemon = || {
            told.set(room.said(LOOKS));
            let room = Arc::clone(&room);
            std::thread::spawn(move || {
                // It says again that it is at it; that ends no wait.
                says(&room, CLONES);
                std::thread::sleep(Duration::from_millis(30));
                says(&room, MADE);
            });
        };
        let began = Instant::now();
        assert!(room.wait(true, || vec![7, 0], daemon));
        assert!(began.elapsed() >= Duration::from_millis(30));
        assert!(matches!(told.take(), Some((needs, _)) if needs == [7, 0]));
        // The attempt has failed.
        let again = || told.set(room.said(LOOKS).inspect(|_| says(&room, NO)));
        assert!(!room.wait(false, || vec![8, 0], again));
        // The time that the daemon has began with the first attempt.
        let (needs, waited) = told.take().unwrap();
        assert!(needs == [8, 0] && waited >= Duration::from_millis(30), "{waited:?}");
        // The next command asks anew, however the last one ended.
        says(&room, MADE);
        assert!(!room.wait(true, Vec::new, || says(&room, NO)));
    }

    #[test]
    fn a_command_does_not_ask_without_end() {
        let room = MemoryPressure::default();
        let times = Cell::new(0);
        let asks = || {
            times.set(times.get() + 1);
            says(&room, MADE);
        };
        let mut first = true;
        while room.wait(first, Vec::new, asks) {
            first = false;
        }
        assert_eq!(times.get(), MOST_ASKED);
    }

    #[test]
    fn a_suspended_client_asks_now_and_then() {
        let room = MemoryPressure::default();
        let told = Cell::new(None);
        room.ask_beside(vec![3], || told.set(room.said(LOOKS)));
        assert_eq!(told.take(), Some((vec![3], Duration::ZERO)));
        room.ask_beside(vec![3], asks_nothing);
        room.lock().asked_beside = Instant::now().checked_sub(ASK_INTERVAL);
        room.ask_beside(vec![4], || told.set(room.said(LOOKS)));
        assert_eq!(told.take(), Some((vec![4], Duration::ZERO)));
    }
}

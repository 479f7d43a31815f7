//! Standstills: a process stops its own threads by ptrace for a moment, to move pages of its memory unnoticed. A thread has
//! one tracer, so CRIU cannot seize a process during a standstill. The two take turns by two words of the shared memory:
//!
//! ```text
//!   client   begin: standstills += 1, then no_standstill?  ── no ──> its threads stand still, standstills -= 1
//!              ^                          │ yes
//!              └── standstills -= 1, sleep until the word changes
//!   worker   forbid: no_standstill = 1, then standstills?  ── 0 ───> the client is quiesced, CRIU may seize it
//!            allow:  no_standstill = 0, and a waiting client wakes
//! ```
//!
//! Each side writes its own word before it reads the other's, so at least one of them sees the other.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::time::Duration;

use crate::futex;
use crate::layout::Shared;
use crate::sync::fence;

/// How long a client sleeps before it checks whether its worker lives.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A standstill of the client's process. It ends when this is dropped.
#[derive(Debug)]
pub struct Standstill<'a>(&'a Shared);

/// Begins a standstill. Waits while the worker forbids it, as long as the worker is `alive`.
pub fn begin(shared: &Shared, alive: impl Fn() -> bool) -> Standstill<'_> {
    let header = shared.header();
    loop {
        header.standstills.fetch_add(1, Relaxed);
        fence(SeqCst);
        let forbidden = header.no_standstill.load(Acquire);
        let standstill = Standstill(shared);
        if forbidden == 0 || !alive() {
            return standstill;
        }
        drop(standstill);
        futex::wait(&header.no_standstill, forbidden, CHECK_INTERVAL);
    }
}

impl Drop for Standstill<'_> {
    fn drop(&mut self) {
        self.0.header().standstills.fetch_sub(1, AcqRel);
    }
}

/// The worker's side: no standstill begins from now on. One may be under way, see [`is_under_way`].
pub fn forbid(shared: &Shared) {
    shared.header().no_standstill.store(1, Relaxed);
    fence(SeqCst);
}

/// Standstills may begin again.
pub fn allow(shared: &Shared) {
    let word = &shared.header().no_standstill;
    word.store(0, Release);
    futex::wake(word, i32::MAX);
}

/// Whether a thread of the client is in a standstill, or about to see that it is forbidden.
pub fn is_under_way(shared: &Shared) -> bool {
    shared.header().standstills.load(Acquire) != 0
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
mod tests {
    use super::*;
    use crate::layout::heap;

    #[test]
    fn a_client_waits_while_standstills_are_forbidden_and_not_for_a_dead_worker() {
        let shared = heap();
        forbid(&shared);
        let waiting = std::thread::spawn(move || drop(begin(&shared, || true)));
        // A client that saw the word gives its turn back again and again.
        while is_under_way(&shared) {
            std::thread::yield_now();
        }
        assert!(!waiting.is_finished());
        allow(&shared);
        waiting.join().unwrap();
        assert!(!is_under_way(&shared));

        forbid(&shared);
        let standstill = begin(&shared, || false);
        assert!(is_under_way(&shared));
        drop(standstill);
        assert!(!is_under_way(&shared));
    }
}

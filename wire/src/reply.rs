//! Waiting for a reply, and for a staging chunk.
//!
//! ```text
//!   FREE ──claim──> PENDING ──the caller sleeps──> ASLEEP
//!     ^                └────────worker finishes──────┴──> DONE ──caller takes──> FREE
//! ```
//!
//! The worker wakes a caller only when it sleeps. A staging chunk uses the same words without the last step: it is
//! `DONE` until it is used again.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

use crate::futex;
use crate::layout::{REPLIES, REPLY_BYTES, Shared};
use crate::sync::AtomicU32;

/// The slot is free.
pub const FREE: u32 = 0;
/// A command that names the slot is on its way.
pub const PENDING: u32 = 1;
/// As [`PENDING`], and the caller sleeps on the word.
pub const ASLEEP: u32 = 2;
/// The worker has answered.
pub const DONE: u32 = 3;
/// Of a staging chunk: the copy did not happen. The lower bits are the error's code.
pub const FAILED: u32 = 1 << 31;

/// Takes a free reply slot for a call, trying `hint` first; `None` when all are in use.
pub fn claim(shared: &Shared, hint: usize) -> Option<usize> {
    (0..REPLIES)
        .map(|i| (hint + i) % REPLIES)
        .find(|&slot| shared.reply(slot).state.compare_exchange(FREE, PENDING, AcqRel, Relaxed).is_ok())
}

/// Whether `word` says [`DONE`] or [`FAILED`].
pub fn is_over(word: &AtomicU32) -> bool {
    word.load(Acquire) >= DONE
}

/// Waits until `word` says [`DONE`] or [`FAILED`]: spins for `spin`, then sleeps. Every 100 ms of sleep it asks `alive`, and gives
/// up with `false` when that says no: the worker is gone, and nobody will ever answer.
pub fn wait(word: &AtomicU32, spin: Duration, alive: impl Fn() -> bool) -> bool {
    if !spin.is_zero() {
        let start = Instant::now();
        loop {
            for _ in 0..64 {
                if is_over(word) {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= spin {
                break;
            }
        }
    }
    loop {
        match word.compare_exchange(PENDING, ASLEEP, AcqRel, Acquire) {
            Ok(_) | Err(ASLEEP) => {}
            Err(_) => return true,
        }
        futex::wait(word, ASLEEP, Duration::from_millis(100));
        if is_over(word) {
            return true;
        }
        if !alive() {
            // The worker may have answered just before it died.
            return is_over(word);
        }
    }
}

/// Gives a slot back after its reply was taken, or after the worker is gone.
pub fn release(shared: &Shared, slot: usize) {
    shared.reply(slot).state.store(FREE, Release);
}

/// The worker's side: marks a word done and wakes its caller if it sleeps.
pub fn finish(word: &AtomicU32) {
    if word.swap(DONE, AcqRel) == ASLEEP {
        futex::wake(word, i32::MAX);
    }
}

/// The worker's side: marks a chunk's copy as failed, and wakes its caller if it sleeps.
pub fn fail(word: &AtomicU32, code: i32) {
    if word.swap(FAILED | code as u32, AcqRel) == ASLEEP {
        futex::wake(word, i32::MAX);
    }
}

/// The client's side: how a chunk's copy ended.
pub fn chunk_result(word: &AtomicU32) -> Result<(), i32> {
    match word.load(Acquire) {
        failed if failed & FAILED != 0 => Err((failed & !FAILED) as i32),
        _ => Ok(()),
    }
}

/// The worker's side: writes result and payload into a slot and finishes it. A payload that does not fit, or a slot
/// that nobody waits in, is the client's mistake or ours, and `false`.
pub fn answer(shared: &Shared, slot: usize, result: i32, payload: &[u8]) -> bool {
    if slot >= REPLIES || payload.len() > REPLY_BYTES {
        return false;
    }
    let reply = shared.reply(slot);
    if !matches!(reply.state.load(Acquire), PENDING | ASLEEP) {
        return false;
    }
    // SAFETY: the payload has REPLY_BYTES bytes, and while the state is PENDING or ASLEEP only the worker writes it; a
    // client that breaks this harms its own reply.
    reply.payload.with_mut(|to| unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), to.cast(), payload.len()) });
    reply.result.store(result, Relaxed);
    reply.length.store(payload.len() as u32, Relaxed);
    finish(&reply.state);
    true
}

/// The client's side: copies a finished slot's payload out and returns the call's result.
pub fn take(shared: &Shared, slot: usize, into: &mut Vec<u8>) -> i32 {
    let reply = shared.reply(slot);
    let length = (reply.length.load(Relaxed) as usize).min(REPLY_BYTES);
    into.clear();
    // SAFETY: the state is DONE, so the worker no longer writes; the length is capped at the payload's size.
    reply.payload.with(|from| into.extend_from_slice(unsafe { std::slice::from_raw_parts(from.cast(), length) }));
    reply.result.load(Relaxed)
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
mod tests {
    use super::*;
    use crate::layout::heap;

    #[test]
    fn a_reply_reaches_its_sleeping_caller() {
        let shared = heap();
        let slot = claim(&shared, 5).unwrap();
        let answering = std::thread::spawn(move || assert!(answer(&shared, slot, 7, b"payload!")));
        assert!(wait(&shared.reply(slot).state, Duration::ZERO, || true));
        let mut payload = Vec::new();
        assert_eq!(take(&shared, slot, &mut payload), 7);
        assert_eq!(payload, b"payload!");
        release(&shared, slot);
        answering.join().unwrap();
    }

    #[test]
    fn a_dead_worker_ends_the_wait() {
        let shared = heap();
        let slot = claim(&shared, 0).unwrap();
        assert!(!wait(&shared.reply(slot).state, Duration::ZERO, || false));
    }

    #[test]
    fn an_answer_to_nobody_is_refused() {
        let shared = heap();
        assert!(!answer(&shared, 3, 0, b""));
        assert!(!answer(&shared, REPLIES, 0, b""));
        let slot = claim(&shared, 0).unwrap();
        assert!(!answer(&shared, slot, 0, &[0; REPLY_BYTES + 1]));
    }

    #[test]
    fn more_callers_than_slots_find_none() {
        let shared = heap();
        for _ in 0..REPLIES {
            assert!(claim(&shared, 0).is_some());
        }
        assert!(claim(&shared, 0).is_none());
    }
}

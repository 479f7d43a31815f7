//! The ring and the replies under a model checker (`loom`): a small shared memory of its atomics, a futex that sleeps until
//! it is woken, and tests that try every order in which a few threads may go, with what weak orderings let them see.
//!
//! No wait has a time limit here. So a wake-up that is lost, which would cost a fifth of a second otherwise, is a deadlock.
//!
//! ```text
//! cargo test -p rekindle-wire --lib --features model
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use loom::sync::Mutex;
use loom::sync::atomic::Ordering::SeqCst;
use loom::thread::{self, Thread};

use crate::layout::{CALL_FUNCTIONS, Header, REPLIES, ReplySlot, UNIT, UNITS};
use crate::sync::{AtomicI32, AtomicU32, AtomicU64, Cell};

/// The shared memory, which is leaked: as [`crate::layout`] describes it, but smaller.
#[derive(Clone, Copy, Debug)]
pub struct Shared(&'static Content);

struct Content {
    header: Header,
    seqs: [AtomicU64; UNITS],
    units: [Cell<[u8; UNIT]>; UNITS],
    replies: [ReplySlot; REPLIES],
}

impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a model's shared memory")
    }
}

// SAFETY: as of the real one: all is atomic, or handed over by atomics. The model checks just that.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    #[cfg(test)]
    fn fresh() -> Self {
        let reply = || ReplySlot {
            state: AtomicU32::new(0),
            result: AtomicI32::new(0),
            length: AtomicU32::new(0),
            reserved: 0,
            payload: Cell::new([0; _]),
        };
        Self(Box::leak(Box::new(Content {
            header: Header::default(),
            seqs: std::array::from_fn(|_| AtomicU64::new(0)),
            units: std::array::from_fn(|_| Cell::new([0; UNIT])),
            replies: std::array::from_fn(|_| reply()),
        })))
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.0.header
    }

    /// The ticket that the content of a unit belongs to, plus one.
    pub fn seq(&self, unit: usize) -> &AtomicU64 {
        &self.0.seqs[unit]
    }

    /// A reply slot.
    pub fn reply(&self, slot: usize) -> &ReplySlot {
        &self.0.replies[slot]
    }

    /// Nothing is counted here.
    pub fn calls(&self, _stripe: usize) -> &[AtomicU64; CALL_FUNCTIONS] {
        unreachable!("no model counts calls")
    }

    /// # Safety
    /// None is needed: whether the caller owns these units is checked.
    pub(crate) unsafe fn store(&self, at: usize, bytes: &[u8]) {
        for part in parts(at, bytes.len()) {
            let from = bytes.as_ptr().wrapping_add(part.offset);
            // SAFETY: a part lies in one unit and in `bytes`.
            self.0.units[part.unit].with_mut(|to| unsafe { to.cast::<u8>().add(part.at).copy_from(from, part.length) });
        }
    }

    /// # Safety
    /// `into` has room for `length` bytes.
    pub(crate) unsafe fn load(&self, at: usize, into: *mut u8, length: usize) {
        for part in parts(at, length) {
            let to = into.wrapping_add(part.offset);
            // SAFETY: a part lies in one unit, and the caller has room for all.
            self.0.units[part.unit].with(|from| unsafe { to.copy_from(from.cast::<u8>().add(part.at), part.length) });
        }
    }
}

/// The part of a run of bytes that lies in one unit.
struct Part {
    unit: usize,
    at: usize,
    /// In the run.
    offset: usize,
    length: usize,
}

fn parts(at: usize, length: usize) -> Vec<Part> {
    let (mut parts, mut offset) = (Vec::new(), 0);
    while offset < length {
        let byte = (at + offset) % (UNITS * UNIT);
        let fits = (UNIT - byte % UNIT).min(length - offset);
        parts.push(Part { unit: byte / UNIT, at: byte % UNIT, offset, length: fits });
        offset += fits;
    }
    parts
}

loom::lazy_static! {
    /// The sleeping threads, each with its word. The kernel's lock of a word's queue orders sleeping and waking as this one.
    static ref SLEEPERS: Mutex<VecDeque<(usize, Thread)>> = Mutex::new(VecDeque::new());
}

fn key(word: &AtomicU32) -> usize {
    std::ptr::from_ref(word) as usize
}

/// As the kernel's, without a time limit.
pub fn wait(word: &AtomicU32, expected: u32, _timeout: Duration) {
    {
        let mut sleepers = SLEEPERS.lock().unwrap_or_else(|_| unreachable!("nothing panics with this lock"));
        if word.load(SeqCst) != expected {
            return;
        }
        sleepers.push_back((key(word), thread::current()));
    }
    thread::park();
}

/// As the kernel's.
pub fn wake(word: &AtomicU32, count: i32) {
    let mut sleepers = SLEEPERS.lock().unwrap_or_else(|_| unreachable!("nothing panics with this lock"));
    for _ in 0..count {
        let Some(at) = sleepers.iter().position(|(sleeps_on, _)| *sleeps_on == key(word)) else { break };
        if let Some((_, sleeper)) = sleepers.remove(at) {
            sleeper.unpark();
        }
    }
}

#[cfg(test)]
mod tests;

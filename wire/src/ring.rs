//! The command ring: many producers, one consumer, one total order.
//!
//! A producer takes a ticket (a count of units) with one atomic addition, which is the order; waits until its units
//! have been consumed from the last round; writes; and publishes by storing ticket + 1 into `seq` of its first unit.
//! The consumer takes commands strictly in ticket order, and waits for one that is taken but not yet published: its
//! thread may be stopped by CRIU in between, and goes on after a restore.
//!
//! ```text
//!   head ── consumed up to here                     tail ── taken up to here
//!     v                                                v
//!   [ command 7 published ][ command 8 being written ]  free ...
//! ```
//!
//! `seq` is an array beside the units, so that no payload can look like a published command.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::time::Duration;

use thiserror::Error;

use crate::futex;
use crate::layout::{MAX_COMMAND, Shared, UNIT, UNITS};
use crate::sync::fence;

/// Bytes of a command's header.
pub const HEADER_BYTES: usize = 32;

/// The header before every command's parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommandHeader {
    /// A line of the driver table, or a command of [`crate::command`].
    pub call: u16,
    /// The reply slot plus one; 0 for a command that nobody waits for.
    pub reply: u16,
    /// Bytes of parameters.
    pub length: u32,
    /// The calling thread's current context; 0 for none.
    pub context: u64,
    /// The calling thread, for its own default stream: a number that the client gives each thread.
    pub thread: u32,
}

impl CommandHeader {
    fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..2].copy_from_slice(&self.call.to_le_bytes());
        bytes[2..4].copy_from_slice(&self.reply.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.length.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.context.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.thread.to_le_bytes());
        bytes
    }

    fn from_bytes(b: &[u8; HEADER_BYTES]) -> Self {
        Self {
            call: u16::from_le_bytes([b[0], b[1]]),
            reply: u16::from_le_bytes([b[2], b[3]]),
            length: u32::from_le_bytes([b[4], b[5], b[6], b[7]]),
            context: u64::from_le_bytes([b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]]),
            thread: u32::from_le_bytes([b[16], b[17], b[18], b[19]]),
        }
    }
}

/// Why a command could not be enqueued.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum EnqueueError {
    /// Longer than [`MAX_COMMAND`]; large data goes in parts.
    #[error("a command of {0} bytes is larger than the ring takes")]
    TooLarge(usize),
    /// The ring was full and the worker is gone.
    #[error("the worker is gone")]
    WorkerGone,
}

fn units_of(length: usize) -> u64 {
    ((HEADER_BYTES + length).div_ceil(UNIT)) as u64
}

/// Enqueues a command: `header` (its length is filled in here) and `parameters`. Blocks while the ring is full, asking
/// `alive` every 100 ms. Returns the ring's end behind it: as long as [`end`] says the same, nothing has followed.
pub fn enqueue(
    shared: &Shared,
    mut header: CommandHeader,
    parameters: &[u8],
    alive: impl Fn() -> bool,
) -> Result<u64, EnqueueError> {
    if HEADER_BYTES + parameters.len() > MAX_COMMAND {
        return Err(EnqueueError::TooLarge(parameters.len()));
    }
    header.length = parameters.len() as u32;
    let shared_header = shared.header();
    let units = units_of(parameters.len());
    let ticket = shared_header.tail.fetch_add(units, Relaxed);
    wait_for_room(shared, ticket + units, alive)?;

    // SAFETY: the units from `ticket` on are this producer's until it publishes them: tickets do not overlap, and the
    // consumer is past the round before.
    unsafe {
        shared.store(byte_of(ticket, 0), &header.to_bytes());
        shared.store(byte_of(ticket, HEADER_BYTES), parameters);
    }
    shared.seq((ticket % UNITS as u64) as usize).store(ticket + 1, Release);
    // The store above must be seen before the load below is made, else both sides could miss each other.
    fence(SeqCst);
    if shared_header.worker_asleep.load(Relaxed) != 0 {
        ring_doorbell(shared);
    }
    Ok(ticket + units)
}

/// How far the ring has been taken by producers.
pub fn end(shared: &Shared) -> u64 {
    shared.header().tail.load(Acquire)
}

/// Wakes the worker if it sleeps.
pub fn ring_doorbell(shared: &Shared) {
    shared.header().doorbell.fetch_add(1, Release);
    futex::wake(&shared.header().doorbell, 1);
}

fn wait_for_room(shared: &Shared, end: u64, alive: impl Fn() -> bool) -> Result<(), EnqueueError> {
    let header = shared.header();
    let has_room = || end.saturating_sub(header.head.load(Acquire)) <= UNITS as u64;
    if has_room() {
        return Ok(());
    }
    header.waiting_for_room.fetch_add(1, SeqCst);
    let result = loop {
        let seen = header.room.load(Acquire);
        fence(SeqCst);
        if has_room() {
            break Ok(());
        }
        futex::wait(&header.room, seen, Duration::from_millis(100));
        if !has_room() && !alive() {
            break Err(EnqueueError::WorkerGone);
        }
    };
    header.waiting_for_room.fetch_sub(1, SeqCst);
    result
}

/// A ring that does not hold what producers of this version write: the client broke it.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the ring holds a command of {0} bytes, more than any can have")]
pub struct BrokenRing(pub u32);

/// The worker's end. Copies each command out before it looks at it.
#[derive(Debug)]
pub struct Consumer {
    shared: Shared,
    head: u64,
    buffer: Vec<u8>,
}

impl Consumer {
    /// Takes up at the position `head`: 0 on a fresh ring, and what [`Consumer::head`] said when the ring was saved.
    pub fn new(shared: Shared, head: u64) -> Self {
        Self { shared, head, buffer: Vec::new() }
    }

    /// The shared memory that the ring is in.
    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Units consumed so far.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Whether a command is published.
    pub fn ready(&self) -> bool {
        self.shared.seq((self.head % UNITS as u64) as usize).load(Acquire) == self.head.wrapping_add(1)
    }

    /// The next command, copied out, or `None` if none is published. It counts as consumed, and its place as free,
    /// from here on.
    pub fn take(&mut self) -> Result<Option<(CommandHeader, &[u8])>, BrokenRing> {
        if !self.ready() {
            return Ok(None);
        }
        let mut bytes = [0; HEADER_BYTES];
        // SAFETY: the range lies in the ring. A client that writes it at the same time harms only its own command,
        // since what counts from here on is the copy.
        unsafe { self.shared.load(byte_of(self.head, 0), bytes.as_mut_ptr(), HEADER_BYTES) };
        let header = CommandHeader::from_bytes(&bytes);
        let length = header.length as usize;
        if HEADER_BYTES + length > MAX_COMMAND {
            return Err(BrokenRing(header.length));
        }
        self.buffer.clear();
        self.buffer.reserve(length);
        // SAFETY: as above; the buffer has the capacity.
        unsafe {
            self.shared.load(byte_of(self.head, HEADER_BYTES), self.buffer.as_mut_ptr(), length);
            self.buffer.set_len(length);
        }
        // A position from an image may be any number.
        self.head = self.head.wrapping_add(units_of(length));
        let shared_header = self.shared.header();
        shared_header.head.store(self.head, Release);
        fence(SeqCst);
        if shared_header.waiting_for_room.load(Relaxed) != 0 {
            shared_header.room.fetch_add(1, Release);
            futex::wake(&shared_header.room, i32::MAX);
        }
        Ok(Some((header, &self.buffer)))
    }

    /// Sleeps until a command is published, the doorbell rings, or `timeout` passes; not at all if `unless` holds. Who
    /// makes it hold and rings the doorbell then is not missed: it is asked after the doorbell was looked at.
    pub fn sleep(&self, timeout: Duration, unless: impl FnOnce() -> bool) {
        let header = self.shared.header();
        let seen = header.doorbell.load(Acquire);
        header.worker_asleep.store(1, SeqCst);
        fence(SeqCst);
        if !self.ready() && !unless() {
            futex::wait(&header.doorbell, seen, timeout);
        }
        header.worker_asleep.store(0, SeqCst);
    }
}

/// Where a command's bytes lie.
fn byte_of(ticket: u64, offset: usize) -> usize {
    ticket as usize % UNITS * UNIT + offset
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
mod tests {
    use super::*;
    use crate::layout::heap;

    #[test]
    fn commands_come_out_whole_and_in_order_across_the_wrap() {
        let shared = heap();
        let mut consumer = Consumer::new(shared, 0);
        for i in 0..20_000_u32 {
            let parameters = vec![i as u8; (i as usize * 37) % 5000];
            let header = CommandHeader { call: 3, thread: i, context: 9, ..Default::default() };
            enqueue(&shared, header, &parameters, || true).unwrap();
            let (got, bytes) = consumer.take().unwrap().unwrap();
            assert_eq!((got.call, got.thread, got.context), (3, i, 9));
            assert_eq!(bytes, parameters);
        }
        assert_eq!(consumer.take(), Ok(None));
        assert!(!consumer.ready());
    }

    #[test]
    fn each_producers_commands_keep_their_order() {
        let shared = heap();
        let producers: Vec<_> = (0..4_u32)
            .map(|p| {
                std::thread::spawn(move || {
                    for i in 0..20_000_u64 {
                        let header = CommandHeader { thread: p, context: i, ..Default::default() };
                        enqueue(&shared, header, &[p as u8; 100], || true).unwrap();
                    }
                })
            })
            .collect();
        let mut consumer = Consumer::new(shared, 0);
        let mut next = [0_u64; 4];
        while next != [20_000; 4] {
            match consumer.take().unwrap() {
                Some((header, bytes)) => {
                    assert_eq!(header.context, next[header.thread as usize]);
                    assert_eq!(bytes, [header.thread as u8; 100]);
                    next[header.thread as usize] += 1;
                }
                None => consumer.sleep(Duration::from_millis(10), || false),
            }
        }
        for p in producers {
            p.join().unwrap();
        }
    }

    #[test]
    fn a_place_taken_but_not_published_holds_up_what_follows() {
        let shared = heap();
        let mut consumer = Consumer::new(shared, 0);
        let ticket = shared.header().tail.fetch_add(1, Relaxed);
        enqueue(&shared, CommandHeader { call: 2, ..Default::default() }, &[], || true).unwrap();
        assert_eq!(consumer.take(), Ok(None));
        assert!(!consumer.ready());
        // SAFETY: the ticket is this test's.
        unsafe { shared.store(byte_of(ticket, 0), &CommandHeader { call: 1, ..Default::default() }.to_bytes()) };
        shared.seq(ticket as usize).store(ticket + 1, Release);
        assert_eq!(consumer.take().unwrap().unwrap().0.call, 1);
        assert_eq!(consumer.take().unwrap().unwrap().0.call, 2);
    }

    #[test]
    fn a_full_ring_of_a_dead_worker_is_an_error() {
        let shared = heap();
        let parameters = vec![0; MAX_COMMAND - HEADER_BYTES];
        let mut result = Ok(0);
        for _ in 0..UNITS * UNIT / MAX_COMMAND + 1 {
            result = enqueue(&shared, CommandHeader::default(), &parameters, || false);
        }
        assert_eq!(result, Err(EnqueueError::WorkerGone));
        let too_large = vec![0; MAX_COMMAND];
        assert!(matches!(
            enqueue(&shared, CommandHeader::default(), &too_large, || true),
            Err(EnqueueError::TooLarge(_))
        ));
    }

    #[test]
    fn a_saved_ring_goes_on_where_it_was() {
        let shared = heap();
        for call in 0..3 {
            enqueue(&shared, CommandHeader { call, ..Default::default() }, b"x", || true).unwrap();
        }
        let mut first = Consumer::new(shared, 0);
        first.take().unwrap();
        let mut second = Consumer::new(shared, first.head());
        assert_eq!(second.take().unwrap().unwrap().0.call, 1);
        assert_eq!(second.take().unwrap().unwrap().0.call, 2);
    }

    #[test]
    fn a_length_that_cannot_be_is_a_broken_ring() {
        let shared = heap();
        let mut bytes = CommandHeader::default().to_bytes();
        bytes[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        // SAFETY: a test of its own ring.
        unsafe { shared.store(0, &bytes) };
        shared.seq(0).store(1, Release);
        assert_eq!(Consumer::new(shared, 0).take(), Err(BrokenRing(u32::MAX)));
    }
}

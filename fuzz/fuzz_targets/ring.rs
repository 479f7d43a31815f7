//! A ring and reply slots of any content. The first bytes say where the worker is in the ring, and what is at the front.

#![no_main]

use std::sync::atomic::Ordering::Relaxed;

use libfuzzer_sys::fuzz_target;
use rekindle_wire::layout::{MAX_COMMAND, REPLIES, REPLY_BYTES, SHARED_SIZE, Shared, UNIT, UNITS};
use rekindle_wire::reply;
use rekindle_wire::ring::Consumer;

thread_local! {
    static SHARED: Shared = {
        let layout = std::alloc::Layout::from_size_align(SHARED_SIZE, 4096).expect("a size");
        // SAFETY: the layout has a size; the memory is leaked, so it stays.
        unsafe { Shared::new(std::alloc::alloc_zeroed(layout)) }
    };
}

fuzz_target!(|data: &[u8]| {
    let Some((head, units)) = data.split_first_chunk::<8>() else { return };
    let head = u64::from_le_bytes(*head);
    SHARED.with(|ring| {
        for (i, unit) in units.chunks(UNIT).take(UNITS).enumerate() {
            let at = (head.wrapping_add(i as u64) % UNITS as u64) as usize;
            // SAFETY: inside the ring: `at` is a unit's number, and a chunk is no longer than a unit.
            unsafe { std::ptr::copy_nonoverlapping(unit.as_ptr(), ring.units().add(at * UNIT), unit.len()) };
            ring.seq(at).store(head.wrapping_add(i as u64 + 1), Relaxed);
        }
        let mut consumer = Consumer::new(*ring, head);
        for _ in 0..UNITS {
            match consumer.take() {
                Ok(Some((header, parameters))) => {
                    assert!(parameters.len() <= MAX_COMMAND);
                    reply::answer(ring, usize::from(header.reply), 0, parameters);
                }
                Ok(None) | Err(_) => break,
            }
            let _ = consumer.ready();
        }
        let slot = head as usize % REPLIES;
        ring.reply(slot).length.store(head as u32, Relaxed);
        let mut taken = Vec::new();
        reply::take(ring, slot, &mut taken);
        assert!(taken.len() <= REPLY_BYTES);
    });
});

//! Asynchronous copies, which are done at once, and the barriers in memory (`mbarrier`) that signal their end.
//!
//! A barrier is a word of 64 bits. Its layout is up to the implementation:
//!
//! ```text
//!  63      62..40                      39..20                  19..0
//!  phase   bytes still to come (mod)   arrivals of a phase     arrivals still to come
//! ```

use std::sync::atomic::{AtomicU64, Ordering};

use crate::exec::machine::{Access, Core, Exec, Flow, Inst, Lanes, NO_ROW};
use crate::fault::FaultKind;

const COUNT: u64 = (1 << 20) - 1;
const EXPECTED_SHIFT: u32 = 20;
const BYTES_SHIFT: u32 = 40;
const BYTES: u64 = ((1 << 23) - 1) << BYTES_SHIFT;
const PHASE: u64 = 1 << 63;

fn begin(count: u64) -> u64 {
    let count = count & COUNT;
    count << EXPECTED_SHIFT | count
}

/// Ends the phase if neither arrivals nor bytes are missing.
fn settle(word: u64) -> u64 {
    if word & (COUNT | BYTES) != 0 {
        return word;
    }
    let expected = word >> EXPECTED_SHIFT & COUNT;
    (word & !COUNT | expected) ^ PHASE
}

fn arrive(word: u64, count: u64) -> u64 {
    settle(word & !COUNT | (word & COUNT).wrapping_sub(count) & COUNT)
}

/// Counts an arrival, and lowers the number of expected arrivals from now on.
fn arrive_drop(word: u64, count: u64) -> u64 {
    let expected = (word >> EXPECTED_SHIFT & COUNT).wrapping_sub(count) & COUNT;
    arrive(word & !(COUNT << EXPECTED_SHIFT) | expected << EXPECTED_SHIFT, count)
}

fn expect(word: u64, bytes: u64) -> u64 {
    word & !BYTES | word.wrapping_add(bytes << BYTES_SHIFT) & BYTES
}

fn complete(word: u64, bytes: u64) -> u64 {
    settle(expect(word, bytes.wrapping_neg()))
}

/// Changes a barrier, and returns its former value; none after a fault.
fn update(w: &mut Core<'_>, addr: u64, lane: usize, f: impl Fn(u64) -> u64) -> Option<u64> {
    let at = w.pointer(Access::Generic, addr, 8, true, lane)?;
    // SAFETY: `pointer` vouches for eight aligned bytes.
    let word = unsafe { AtomicU64::from_ptr(at.cast()) };
    let mut old = word.load(Ordering::SeqCst);
    loop {
        match word.compare_exchange(old, f(old), Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => return Some(old),
            Err(now) => old = now,
        }
    }
}

/// For each lane: changes the barrier at `a` with rows `b` and `c`, and returns its former value.
fn change(w: &mut Core<'_>, i: &Inst, f: impl Fn(u64, u64, u64) -> u64) -> Flow {
    for lane in Lanes(w.active) {
        let addr: u64 = w.get(i.a, lane);
        let operand = |row| if row == NO_ROW { 1 } else { u64::from(w.get::<u32>(row, lane)) };
        let (b, c) = (operand(i.b), operand(i.c));
        let Some(old) = update(w, addr, lane, |old| f(old, b, c)) else { return Flow::Fault };
        if i.d != NO_ROW {
            w.put(i.d, lane, old);
        }
    }
    Flow::Next
}

/// The operations on a barrier that change it. Row `a` is its generic address; `b`, if there, a
/// count of arrivals (else one), `c` a number of bytes.
pub(crate) fn barrier(operation: &str) -> Option<Exec> {
    Some(match operation {
        "init" => |w, i| change(w, i, |_, count, _| begin(count)),
        "inval" => |w, i| change(w, i, |_, _, _| 0),
        "arrive" => |w, i| change(w, i, |old, count, _| arrive(old, count)),
        "arrive_drop" => |w, i| change(w, i, |old, count, _| arrive_drop(old, count)),
        "arrive.expect_tx" => |w, i| change(w, i, |old, _, bytes| arrive(expect(old, bytes), 1)),
        "arrive_drop.expect_tx" => |w, i| change(w, i, |old, _, bytes| arrive_drop(expect(old, bytes), 1)),
        "expect_tx" => |w, i| change(w, i, |old, _, bytes| expect(old, bytes)),
        "complete_tx" => |w, i| change(w, i, |old, _, bytes| complete(old, bytes)),
        _ => return None,
    })
}

/// `test_wait` and `try_wait`: whether a phase is over, as a predicate. The phase is given by an arrival's result (row `b` is
/// wide), or by its parity.
pub(crate) fn test(parity: bool) -> Exec {
    fn over(w: &mut Core<'_>, i: &Inst, phase: impl Fn(&Core<'_>, usize) -> bool) -> Flow {
        w.poll();
        let mut over = 0;
        for lane in Lanes(w.active) {
            let addr: u64 = w.get(i.a, lane);
            let Some(now) = update(w, addr, lane, |old| old) else { return Flow::Fault };
            over |= u32::from((now & PHASE != 0) != phase(w, lane)) << lane;
        }
        w.set_predicate(i.d, over);
        Flow::Next
    }
    if parity {
        |w, i| over(w, i, |w, lane| w.get::<u32>(i.b, lane) & 1 != 0)
    } else {
        |w, i| over(w, i, |w, lane| w.get::<u64>(i.b, lane) & PHASE != 0)
    }
}

/// `mbarrier.pending_count`.
pub(crate) fn pending() -> Exec {
    |w, i| w.map1(i, |state: u64| (state & COUNT) as u32)
}

/// The longest copy: more than any shared memory holds.
const COPY_LIMIT: u32 = 1 << 20;

fn copy(w: &mut Core<'_>, lane: usize, to: u64, from: u64, taken: u32, bytes: u32) -> Flow {
    if bytes > COPY_LIMIT {
        return w.fail(FaultKind::Unmapped, to, lane);
    }
    for at in 0..u64::from(bytes) {
        let value = if at < u64::from(taken) {
            match w.pointer(Access::Generic, from.wrapping_add(at), 1, false, lane) {
                // SAFETY: `pointer` vouches for it.
                Some(from) => unsafe { from.read_volatile() },
                None => return Flow::Fault,
            }
        } else {
            0
        };
        match w.pointer(Access::Generic, to.wrapping_add(at), 1, true, lane) {
            // SAFETY: as above.
            Some(to) => unsafe { to.write_volatile(value) },
            None => return Flow::Fault,
        }
    }
    Flow::Next
}

/// `cp.async`: rows `a` and `b` are generic addresses, `c` the size, `e` how much of it is taken
/// from the source, the rest being zero.
pub(crate) fn small() -> Exec {
    |w, i| {
        for lane in Lanes(w.active) {
            let (to, from) = (w.get(i.a, lane), w.get(i.b, lane));
            let bytes: u32 = w.get(i.c, lane);
            if copy(w, lane, to, from, w.get(i.e, lane), bytes) == Flow::Fault {
                return Flow::Fault;
            }
        }
        Flow::Next
    }
}

/// `cp.async.bulk`: rows as for [`small`], but `e`, if there, is the address of a barrier which is
/// told of the bytes.
pub(crate) fn bulk() -> Exec {
    |w, i| {
        for lane in Lanes(w.active) {
            let (to, from) = (w.get(i.a, lane), w.get(i.b, lane));
            let bytes: u32 = w.get(i.c, lane);
            if copy(w, lane, to, from, bytes, bytes) == Flow::Fault {
                return Flow::Fault;
            }
            if i.e != NO_ROW {
                let barrier: u64 = w.get(i.e, lane);
                let told = update(w, barrier, lane, |old| complete(old, u64::from(bytes)));
                if told.is_none() {
                    return Flow::Fault;
                }
            }
        }
        Flow::Next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_end_when_all_have_arrived() {
        let mut word = begin(3);
        for _ in 0..2 {
            word = arrive(word, 1);
            assert_eq!(word & PHASE, 0);
        }
        word = arrive(word, 1);
        assert_eq!(word, PHASE | begin(3));
        word = arrive(arrive_drop(word, 1), 2);
        assert_eq!(word, begin(2));
    }

    #[test]
    fn phases_wait_for_bytes_in_either_order() {
        let late = complete(arrive(expect(begin(1), 4096), 1), 4096);
        let early = arrive(expect(complete(begin(1), 4096), 4096), 1);
        assert_eq!((late, early), (PHASE | begin(1), PHASE | begin(1)));
        assert_eq!(arrive(expect(begin(1), 16), 1) & PHASE, 0);
    }
}

//! The gate that every call passes: closed, calls wait.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Whether this process can be checkpointed; otherwise calls pass without looking.
static IN_USE: AtomicBool = AtomicBool::new(false);
static GATE: Mutex<Gate> = Mutex::new(Gate { closed: false, inside: 0 });
static CHANGED: Condvar = Condvar::new();

thread_local! {
    /// Calls that this thread is in: one of them may be made by another.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

struct Gate {
    closed: bool,
    /// Threads that are inside.
    inside: usize,
}

fn gate() -> MutexGuard<'static, Gate> {
    GATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has calls pass the gate from now on.
pub(super) fn build() {
    IN_USE.store(true, Ordering::SeqCst);
}

/// A call that has passed.
pub(crate) struct Inside(bool);

/// Passes, and waits while the gate is closed.
pub(crate) fn enter() -> Inside {
    if !IN_USE.load(Ordering::Relaxed) {
        return Inside(false);
    }
    if DEPTH.get() == 0 {
        let mut gate = gate();
        while gate.closed {
            gate = CHANGED.wait(gate).unwrap_or_else(PoisonError::into_inner);
        }
        gate.inside += 1;
    }
    DEPTH.set(DEPTH.get() + 1);
    Inside(true)
}

impl Drop for Inside {
    fn drop(&mut self) {
        if !self.0 {
            return;
        }
        DEPTH.set(DEPTH.get() - 1);
        if DEPTH.get() == 0 {
            gate().inside -= 1;
            CHANGED.notify_all();
        }
    }
}

/// Closes the gate, and waits until nobody is inside and `rest` holds; opens it again if that is not by then. Returns whether it is
/// closed.
pub(super) fn close(until: Option<Instant>, rest: impl Fn() -> bool) -> bool {
    const STEP: Duration = Duration::from_millis(1);
    let mut gate = gate();
    gate.closed = true;
    loop {
        if gate.inside == 0 && rest() {
            return true;
        }
        if until.is_some_and(|it| Instant::now() >= it) {
            gate.closed = false;
            CHANGED.notify_all();
            return false;
        }
        gate = CHANGED.wait_timeout(gate, STEP).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// Opens the gate.
pub(super) fn open() {
    gate().closed = false;
    CHANGED.notify_all();
}

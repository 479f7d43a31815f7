//! Threads, and their synchronisation.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A thread with a name. There may be a thousand, so their stacks are small.
pub(super) fn thread(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).stack_size(512 << 10).spawn(body)
}

/// Runs the action for all of these at once, each in a thread of its own, and waits for all. The results are in their order.
pub(super) fn at_once<T: Sync, R: Send>(all: &[T], action: impl Fn(&T) -> R + Sync) -> Vec<R> {
    match all {
        [one] => vec![action(one)],
        all => std::thread::scope(|scope| {
            let action = &action;
            let begun: Vec<_> = all.iter().map(|it| scope.spawn(move || action(it))).collect();
            begun.into_iter().map(|it| it.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        }),
    }
}

/// Locks a mutex. A thread that panicked left consistent data: no change is half-way under a lock.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a change. The lock is free meanwhile.
pub(super) fn wait<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Like [`wait`], at most for a time.
pub(super) fn wait_timeout<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>, time: Duration) -> MutexGuard<'a, T> {
    changed.wait_timeout(guard, time).unwrap_or_else(PoisonError::into_inner).0
}

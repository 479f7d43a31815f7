//! Several threads that do what one hands out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};

use crate::StoreError;

/// Locks, also what a thread has left that panicked: the panic itself is passed on when the threads are joined.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has `work` done by so many threads on each item that `produce` gives. Few items wait at a time, so that long ones
/// do not fill the memory. After the first error nothing more is begun; giving says then that there is no use in
/// going on.
pub(crate) fn each<T: Send>(
    threads: usize,
    produce: impl FnOnce(&mut dyn FnMut(T) -> bool) -> Result<(), StoreError>,
    work: impl Fn(T) -> Result<(), StoreError> + Sync,
) -> Result<(), StoreError> {
    let (give, take) = mpsc::sync_channel::<T>(threads.div_ceil(2));
    let take = Mutex::new(take);
    let failed = AtomicBool::new(false);
    let first = Mutex::new(None);
    let worker = || {
        loop {
            let item = lock(&take).recv();
            let Ok(item) = item else { return };
            if failed.load(Ordering::Relaxed) {
                continue;
            }
            if let Err(error) = work(item) {
                failed.store(true, Ordering::Relaxed);
                lock(&first).get_or_insert(error);
            }
        }
    };
    let produced = std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(worker);
        }
        let produced = produce(&mut |item| !failed.load(Ordering::Relaxed) && give.send(item).is_ok());
        drop(give);
        produced
    });
    match first.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => produced,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn all_is_done_and_an_error_ends_it() {
        let sum = AtomicU64::new(0);
        let produce = |give: &mut dyn FnMut(u64) -> bool| {
            (1..=1000).all(give);
            Ok(())
        };
        each(4, produce, |item| {
            sum.fetch_add(item, Ordering::Relaxed);
            Ok(())
        })
        .unwrap();
        assert_eq!(sum.into_inner(), 500_500);
        let given = AtomicU64::new(0);
        let endless = |give: &mut dyn FnMut(u64) -> bool| {
            while give(given.fetch_add(1, Ordering::Relaxed)) {}
            Ok(())
        };
        let error = each(4, endless, |item| if item == 7 { Err(StoreError::refused("seven")) } else { Ok(()) });
        assert_eq!(error.unwrap_err().to_string(), "seven");
    }
}

//! Hashes that the device makes of memory that nothing writes, while lanes copy it already: a lane stores the device's hash with the content
//! and need not make one. It waits for a hash that is not there yet; the device hashes some fifty times as fast as the link copies.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rekindle_images::PieceHash;

/// The hashes of a copy's jobs, by their numbers.
#[derive(Debug, Default)]
pub(crate) struct DeviceHashes {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    found: Vec<Option<PieceHash>>,
    /// The device makes hashes, and they are not all there.
    under_way: bool,
}

/// Puts the device's hashes into their places. No lane waits for more when this is dropped.
#[derive(Debug)]
pub(crate) struct Maker<'a>(&'a DeviceHashes);

impl DeviceHashes {
    /// The device is about to hash so many jobs: lanes wait for its hashes from now on.
    pub(super) fn expect(&self, jobs: usize) {
        *self.lock() = Inner { found: vec![None; jobs], under_way: true };
    }

    pub(crate) fn make(&self) -> Maker<'_> {
        Maker(self)
    }

    /// The hash of a job, which this waits for; none if the device does not make it.
    pub(crate) fn of(&self, job: usize) -> Option<PieceHash> {
        let mut inner = self.lock();
        loop {
            match inner.found.get(job).copied().flatten() {
                None if inner.under_way => inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner),
                found => return found,
            }
        }
    }

    /// Waits until the device makes no hashes any more: until then it reads the jobs' memory.
    pub(crate) fn wait_until_made(&self) {
        let made = self.changed.wait_while(self.lock(), |inner| inner.under_way);
        drop(made.unwrap_or_else(PoisonError::into_inner));
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Maker<'_> {
    pub(crate) fn put(&self, hashes: impl IntoIterator<Item = (usize, PieceHash)>) {
        let mut inner = self.0.lock();
        for (job, hash) in hashes {
            if let Some(place) = inner.found.get_mut(job) {
                *place = Some(hash);
            }
        }
        drop(inner);
        self.0.changed.notify_all();
    }
}

impl Drop for Maker<'_> {
    fn drop(&mut self) {
        self.0.lock().under_way = false;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    fn hash(text: &str) -> PieceHash {
        PieceHash::from_bytes([text.as_bytes()[0]; 16])
    }

    #[test]
    fn nobody_waits_where_the_device_hashes_nothing() {
        assert_eq!(DeviceHashes::default().of(0), None);
        DeviceHashes::default().wait_until_made();
    }

    #[test]
    fn a_lane_waits_for_its_hash_and_for_no_other_and_not_when_no_more_come() {
        let hashes = DeviceHashes::default();
        hashes.expect(3);
        let (says, said) = channel();
        std::thread::scope(|scope| {
            let maker = hashes.make();
            for job in [1, 2, 3] {
                let (says, hashes) = (says.clone(), &hashes);
                scope.spawn(move || says.send((job, hashes.of(job))).unwrap());
            }
            said.recv_timeout(Duration::from_millis(50)).unwrap_err();
            maker.put([(1, hash("1")), (0, hash("0"))]);
            assert_eq!(said.recv().unwrap(), (1, Some(hash("1"))));
            assert_eq!(hashes.of(0), Some(hash("0")));
            let (says, hashes) = (says.clone(), &hashes);
            scope.spawn(move || {
                hashes.wait_until_made();
                says.send((usize::MAX, None)).unwrap();
            });
            said.recv_timeout(Duration::from_millis(50)).unwrap_err();
            drop(maker);
            let mut rest = [0; 3].map(|_| said.recv().unwrap());
            rest.sort_unstable_by_key(|(job, _)| *job);
            assert_eq!(rest, [(2, None), (3, None), (usize::MAX, None)]);
        });
    }
}

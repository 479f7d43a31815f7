//! Limits how fast lanes copy over a device's link: never faster than the daemon allows, and after transfers of the
//! application's own (PhoenixOS, SOSP'25, section 5).
//!
//! The limit is a bucket of a hundredth of a second. The daemon divides its limit among the clients that copy from a GPU, and
//! sends a new limit when their number changes.
//!
//! The application's transfers are counted from when they are enqueued until they are done, but only while a copy is under way,
//! since each costs a private event. A lane lets them go first, but not for ever: a transfer may be behind a kernel that runs
//! for seconds.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::session::waiting::Transfer;
use rekindle_wire::window::MAX_DEVICES;

/// How long a lane gives way before a piece: the time of a transfer of 100 MB. Pieces are then still copied at more than a
/// tenth of a link's rate.
const GIVES_WAY: Duration = Duration::from_millis(2);
/// Unused bandwidth may be used later: this much of it, since lanes wake up late.
const CREDIT: Duration = Duration::from_millis(10);
/// How often a waiting lane checks.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// How soon a lane that is held back notices that it need not wait any longer.
const LONG_LOOK: Duration = Duration::from_millis(5);

/// The links of all devices, by the worker's device numbers.
#[derive(Clone, Default)]
pub(crate) struct Pace(Arc<Inner>);

#[derive(Default)]
struct Inner {
    devices: [Link; MAX_DEVICES],
    /// Whether lanes ignore the application's transfers.
    not_first: AtomicBool,
    /// The number of the copy that is under way; 0 if there is none.
    copy: AtomicU64,
    copies: AtomicU64,
    gave_way: AtomicU64,
    gave_way_ns: AtomicU64,
}

#[derive(Default)]
struct Link {
    /// Bytes per second; 0 means unlimited.
    limit: AtomicU64,
    /// When the next piece may begin.
    next: Mutex<Option<Instant>>,
    /// The number of the application's transfers to the host that are not done.
    transfers: AtomicUsize,
}

/// A copy is under way while this value exists.
pub(crate) struct UnderWay<'a>(&'a Pace);

impl Pace {
    /// Sets each device's limit from now on, in bytes per second; 0 means none.
    pub(crate) fn limit(&self, bytes: &[u64]) {
        for (link, bytes) in self.0.devices.iter().zip(bytes) {
            link.limit.store(*bytes, Relaxed);
        }
    }

    /// Sets whether the application's transfers go first.
    pub(crate) fn application_first(&self, first: bool) {
        self.0.not_first.store(!first, Relaxed);
    }

    /// Begins a copy.
    pub(crate) fn begin(&self) -> UnderWay<'_> {
        self.0.devices.iter().for_each(|link| link.transfers.store(0, Relaxed));
        self.0.gave_way.store(0, Relaxed);
        self.0.gave_way_ns.store(0, Relaxed);
        if !self.0.not_first.load(Relaxed) {
            self.0.copy.store(self.0.copies.fetch_add(1, Relaxed) + 1, Relaxed);
        }
        UnderWay(self)
    }

    /// How often lanes of the last copy have given way to the application, and for how long in total.
    pub(crate) fn gave_way(&self) -> (u64, Duration) {
        (self.0.gave_way.load(Relaxed), Duration::from_nanos(self.0.gave_way_ns.load(Relaxed)))
    }

    /// Called when the application has enqueued a transfer from this device to the host. Returns `None` while no copy needs to
    /// know.
    pub(crate) fn transfer(&self, device: usize) -> Option<Transfer> {
        let copy = self.0.copy.load(Relaxed);
        let link = self.0.devices.get(device).filter(|_| copy != 0)?;
        link.transfers.fetch_add(1, Relaxed);
        Some(Transfer { device, copy })
    }

    /// Called when the transfer is done.
    pub(crate) fn transferred(&self, transfer: Transfer) {
        if self.0.copy.load(Relaxed) == transfer.copy
            && let Some(link) = self.0.devices.get(transfer.device)
        {
            let _ = link.transfers.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
        }
    }

    /// Waits until a lane may take this many bytes. Returns whether it may: false once `given_up` says that there is nothing to
    /// take.
    pub(crate) fn wait(&self, device: usize, bytes: u64, given_up: impl Fn() -> bool) -> bool {
        let Some(link) = self.0.devices.get(device) else { return true };
        loop {
            let limit = link.limit.load(Relaxed);
            let Some(left) = link.try_take(limit, bytes) else { break };
            if given_up() {
                return false;
            }
            std::thread::sleep(left.min(LONG_LOOK));
        }
        true
    }

    /// Called when a lane has waited for some bytes of a device, and takes others, or none. Counts the bytes that it takes
    /// instead.
    pub(crate) fn correct(&self, waited: Option<(usize, u64)>, took: Option<(usize, u64)>) {
        if waited == took {
            return;
        }
        let link = |it: Option<(usize, u64)>| it.and_then(|(device, bytes)| Some((self.0.devices.get(device)?, bytes)));
        if let Some((link, bytes)) = link(took) {
            link.put_off(bytes);
        }
        if let Some((link, bytes)) = link(waited) {
            link.give_back(bytes);
        }
    }

    /// Lets the application's transfers go first, for a moment.
    pub(crate) fn give_way(&self, device: usize, given_up: impl Fn() -> bool) {
        let Some(link) = self.0.devices.get(device).filter(|link| link.transfers.load(Relaxed) > 0) else { return };
        let began = Instant::now();
        while link.transfers.load(Relaxed) > 0 && began.elapsed() < GIVES_WAY && !given_up() {
            std::thread::sleep(POLL_INTERVAL);
        }
        self.0.gave_way.fetch_add(1, Relaxed);
        self.0.gave_way_ns.fetch_add(began.elapsed().as_nanos() as u64, Relaxed);
    }
}

impl Link {
    /// Takes the lane's turn, or returns how long to wait for it.
    fn try_take(&self, limit: u64, bytes: u64) -> Option<Duration> {
        if limit == 0 {
            return None;
        }
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        match *next {
            Some(next) if next > now => Some(next - now),
            due => {
                *next = Some(after_credit(due, now) + Duration::from_secs_f64(bytes as f64 / limit as f64));
                None
            }
        }
    }

    /// Counts bytes that were taken out of turn.
    fn put_off(&self, bytes: u64) {
        let Some(by) = self.time_of(bytes) else { return };
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        *next = after_credit(*next, Instant::now()).checked_add(by);
    }

    /// Returns bytes that were not taken.
    fn give_back(&self, bytes: u64) {
        let Some(by) = self.time_of(bytes) else { return };
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        *next = next.and_then(|next| next.checked_sub(by));
    }

    /// The time that these bytes take. `None` if there is no limit.
    fn time_of(&self, bytes: u64) -> Option<Duration> {
        let limit = self.limit.load(Relaxed);
        (limit > 0).then(|| Duration::from_secs_f64(bytes as f64 / limit as f64))
    }
}

/// The time from which a piece counts: when it is due, except that time long past is no credit.
fn after_credit(due: Option<Instant>, now: Instant) -> Instant {
    due.map_or(now, |due| due.max(now.checked_sub(CREDIT).unwrap_or(now)))
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.0.copy.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GOES_ON: fn() -> bool = || false;

    #[test]
    fn lanes_together_are_never_faster_than_they_may_be() {
        let pace = Pace::default();
        pace.limit(&[0, 100 * MIB]);
        let began = Instant::now();
        let taken = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..5 {
                        assert!(pace.wait(1, MIB, GOES_ON));
                        // The first piece is taken at once; no later piece is taken more than that ahead of its time.
                        let taken = taken.fetch_add(MIB, Relaxed);
                        assert!(taken as f64 <= began.elapsed().as_secs_f64() * (100 * MIB) as f64 + 3.0 * MIB as f64);
                    }
                });
            }
        });
        assert!(began.elapsed() >= Duration::from_millis(190), "{:?}", began.elapsed());
    }

    #[test]
    fn time_that_was_not_used_is_little_credit_and_a_new_limit_counts_at_once() {
        let pace = Pace::default();
        pace.limit(&[MIB]);
        assert!(pace.wait(0, MIB / 100, GOES_ON));
        std::thread::sleep(Duration::from_millis(50));
        let began = Instant::now();
        for bytes in [MIB / 100, MIB / 100, 1000 * MIB] {
            assert!(pace.wait(0, bytes, GOES_ON));
        }
        assert!(began.elapsed() >= Duration::from_millis(9));
        // The next byte would have to wait for a quarter of an hour.
        let gives_up = Instant::now() + Duration::from_millis(20);
        assert!(!pace.wait(0, 1, || Instant::now() > gives_up));
        pace.limit(&[0]);
        assert!(pace.wait(0, 1000 * MIB, GOES_ON));
    }

    #[test]
    fn what_was_waited_for_and_not_taken_is_given_back() {
        let pace = Pace::default();
        pace.limit(&[MIB, MIB]);
        let waits = |device| !pace.wait(device, 1, || true);
        assert!(pace.wait(0, 1000 * MIB, GOES_ON) && waits(0));
        pace.correct(Some((0, 1000 * MIB)), None);
        assert!(!waits(0));
        // Bytes that are taken from another device count on that device.
        pace.correct(Some((0, 1)), Some((1, 1000 * MIB)));
        assert!(waits(1) && !waits(0));
    }

    #[test]
    fn lanes_give_way_to_the_application_but_not_for_ever() {
        let pace = Pace::default();
        assert_eq!(pace.transfer(0), None);
        let copy = pace.begin();
        let transfer = pace.transfer(0).unwrap();
        // A transfer that never ends, as far as this code knows.
        pace.give_way(0, GOES_ON);
        pace.give_way(1, GOES_ON);
        let (times, long) = pace.gave_way();
        assert!(times == 1 && long >= GIVES_WAY, "{times} {long:?}");
        pace.transferred(transfer);
        pace.give_way(0, GOES_ON);
        assert_eq!(pace.gave_way().0, 1);
        let of_old = pace.transfer(0).unwrap();
        drop(copy);
        // Transfers counted in one copy do not affect the next.
        let _copy = pace.begin();
        pace.transfer(0).unwrap();
        pace.transferred(of_old);
        pace.give_way(0, GOES_ON);
        assert_eq!(pace.gave_way().0, 1);
    }

    #[test]
    fn where_it_is_not_to_go_first_nothing_is_counted() {
        let pace = Pace::default();
        pace.application_first(false);
        let _copy = pace.begin();
        assert_eq!(pace.transfer(0), None);
    }
}

//! For how long a client has had work on each device, for `rekindle ps` and the metrics.
//!
//! The executor samples this: at random times, 5 ms apart on average, it asks the driver which devices have unfinished work. Each
//! device that has some is given those 5 ms. The times between samples are distributed exponentially, so a sample hits every moment with
//! the same probability, whatever rhythm the client's work has, and a time in which nothing runs needs no samples (Poisson arrivals see
//! time averages). After `t` seconds of work the sum is off by `sqrt(0.005 * t)` seconds (one standard deviation): by 0.55 s after a
//! minute, which is 0.9 %.
//!
//! Work is unfinished from when the driver gets it until its stream is idle. A stream that waits for another stream, or for a word of
//! memory that nobody has written yet, has work.

use std::time::{Duration, Instant};

use rekindle_cuda_abi::types::*;

use crate::session::call::Call;

/// The mean time between samples.
const MEAN: Duration = Duration::from_millis(5);
/// The time without a sample where nothing can run any more.
const PAUSE: Duration = Duration::from_secs(5);

/// The time of one client.
#[derive(Debug)]
pub(crate) struct GpuTime {
    /// By the device's number in the worker.
    used: Vec<Duration>,
    next: Instant,
    random: u64,
}

impl GpuTime {
    /// No time yet.
    pub(crate) fn new(devices: usize) -> Self {
        // Any number but 0 starts the generator; workers should not sample at the same moments.
        let random = u64::from(std::process::id()).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Self { used: vec![Duration::ZERO; devices], next: Instant::now() + MEAN, random }
    }

    /// Nothing has run until now, or is counted: the next sample is as far away as ever.
    pub(crate) fn restart(&mut self, now: Instant) {
        self.next = now + self.interval();
    }

    /// Whether a sample is due.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.next <= now
    }

    /// The time of the next sample.
    pub(crate) fn next(&self) -> Instant {
        self.next
    }

    /// Samples.
    pub(crate) fn sample(&mut self, now: Instant, call: &mut Call) {
        let more = self.passed(now);
        let Found { busy, is_broken } = look(call, self.used.len());
        if is_broken && !busy.contains(&true) {
            // Streams of a broken context never become idle.
            self.next = now + PAUSE;
        }
        for (used, is_busy) in self.used.iter_mut().zip(busy) {
            if is_busy {
                *used += more;
            }
        }
    }

    /// What the samples that are due stand for: there are several after a long call of the executor's.
    fn passed(&mut self, now: Instant) -> Duration {
        let mut passed = Duration::ZERO;
        while self.next <= now {
            passed += MEAN;
            let interval = self.interval();
            self.next += interval;
        }
        passed
    }

    /// Nanoseconds for each device.
    pub(crate) fn nanoseconds(&self) -> Vec<u64> {
        self.used.iter().map(|it| u64::try_from(it.as_nanos()).unwrap_or(u64::MAX)).collect()
    }

    /// A time from the exponential distribution, by Marsaglia's xorshift64 and the inverse of the distribution.
    fn interval(&mut self) -> Duration {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        // 53 bits are as many as the mantissa has; in (0, 1], so that the logarithm is finite.
        let uniform = ((self.random >> 11) + 1) as f64 / (1u64 << 53) as f64;
        MEAN.mul_f64(-uniform.ln())
    }
}

/// What a sample finds.
struct Found {
    /// Whether a device has unfinished work.
    busy: Vec<bool>,
    /// Whether the driver has answered with an error, which the next command finds as well.
    is_broken: bool,
}

fn look(call: &mut Call, devices: usize) -> Found {
    let (mut busy, mut is_broken) = (vec![false; devices], false);
    for key in call.session.waiting.busy(0) {
        let Ok(device) = call.session.device_of_context(key.context) else { continue };
        let Some(is_busy) = busy.get_mut(device) else { continue };
        if *is_busy {
            continue;
        }
        if call.enter(key.context).is_err() {
            is_broken = true;
            continue;
        }
        let Some(real) = call.session.waiting.real(key) else { continue };
        // SAFETY: the handle is the driver's own.
        match unsafe { (call.driver().cuStreamQuery)(real) } {
            CUDA_SUCCESS => call.session.waiting.all_done(key),
            CUDA_ERROR_NOT_READY => *is_busy = true,
            _ => is_broken = true,
        }
    }
    Found { busy, is_broken }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_between_samples_are_five_milliseconds_on_average_and_forget_what_was() {
        let mut time = GpuTime::new(1);
        let many: Vec<f64> = (0..100_000).map(|_| time.interval().as_secs_f64()).collect();
        let mean = many.iter().sum::<f64>() / many.len() as f64;
        // Five standard deviations of the mean.
        assert!((mean / MEAN.as_secs_f64() - 1.0).abs() < 5.0 / (many.len() as f64).sqrt(), "{mean}");
        let longer = many.iter().filter(|it| **it > MEAN.as_secs_f64()).count() as f64 / many.len() as f64;
        assert!((longer - (-1.0f64).exp()).abs() < 0.01, "{longer}");
    }

    #[test]
    fn samples_stand_for_the_time_that_has_passed() {
        let mut time = GpuTime::new(1);
        let start = Instant::now();
        time.restart(start);
        let minute = Duration::from_secs(60);
        assert!(time.is_due(start + minute));
        let passed = time.passed(start + minute).as_secs_f64();
        // Five standard deviations.
        assert!((passed - 60.0).abs() < 5.0 * (0.005 * 60.0f64).sqrt(), "{passed}");
        assert!(!time.is_due(start + minute));
    }
}

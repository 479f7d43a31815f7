//! How often a job fails: what the administrator says of a GPU, corrected by what is seen of this job.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The failures that were seen of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Failures {
    /// How many.
    pub seen: u32,
    /// In how many seconds of watching.
    pub watched: f64,
}

impl Failures {
    /// The job's mean time between failures, in seconds, if one of its `gpus` GPUs fails every `mtbf` on average.
    ///
    /// Failures that come at random are one for each M/N of N GPUs (the paper's A.1). What was configured counts as one
    /// failure that was seen in that time: so the first failures count for much where somebody has guessed, and after many it
    /// is what was seen that counts.
    #[must_use]
    pub fn mean_time(&self, mtbf: Duration, gpus: usize) -> f64 {
        let configured = mtbf.as_secs_f64() / gpus.max(1) as f64;
        (configured + self.watched) / f64::from(self.seen.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_configured_counts_until_more_is_known() {
        let day = Duration::from_secs(24 * 3600);
        let mean = |seen, hours: f64, gpus| Failures { seen, watched: hours * 3600.0 }.mean_time(day, gpus) / 3600.0;
        assert!((mean(0, 0.0, 1) - 24.0).abs() < 1e-9);
        assert!((mean(0, 0.0, 8) - 3.0).abs() < 1e-9, "eight GPUs fail eight times as often");
        assert!((mean(1, 2.0, 1) - 13.0).abs() < 1e-9);
        assert!((mean(99, 100.0, 1) - 1.24).abs() < 1e-9, "it is nearly one an hour");
        assert!(mean(0, 1000.0, 1) > 1000.0, "none in a long time");
    }
}

//! The interval between checkpoints at which a job loses least.
//!
//! A job loses time in two ways: each checkpoint makes it stand still, and each failure takes it back to its newest image.
//! With an interval τ from the beginning of one checkpoint to that of the next, a stall O for each, and a mean time M
//! between the job's failures, it loses about
//!
//! ```text
//!   O / τ  +  (τ / 2 + D + R) / M          of its time
//! ```
//!
//! R is the time of a restore, and D the time until an image is durable: a failure before that takes the job back to the
//! image before. Neither changes which τ is best.
//!
//! * **Concurrent protocols** (`clone`, `cow`, `recopy`): the job runs on while its image is written, so O is
//!   small. The minimum is where the PhoenixOS paper has it (appendix A.1, "Determine the optimal checkpoint frequency"):
//!   f* = √(N·F / 2·O) checkpoints an hour for N GPUs that fail F times an hour each, which is τ = √(2·O·M).
//! * **`stop`**: the job stands still for the whole copy. O is then no small part of τ, for which J. T. Daly gives a
//!   better approximation ("A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation
//!   37) of J. W. Young's √(2·O·M) (1974).
//!
//! Checkpoints of one job do not overlap, so τ is at least D.
//!
//! The tests simulate jobs that fail, and search for the best interval.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// No interval is shorter: below it the job would hardly do anything else.
pub const SHORTEST: Duration = Duration::from_millis(100);
/// No interval is longer: nobody wants to lose more than a day.
pub const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// What a checkpoint costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Seconds for which the job stands still.
    pub stall: f64,
    /// Seconds from the beginning of the checkpoint until its image is durable and checked.
    pub durable: f64,
    /// Whether the job runs while its image is written.
    pub concurrent: bool,
}

impl Cost {
    /// The mean of several costs. Under `stop` if any of them was: those cost most.
    #[must_use]
    pub fn mean(costs: impl IntoIterator<Item = Self>) -> Option<Self> {
        let costs: Vec<_> = costs.into_iter().collect();
        let count = costs.len() as f64;
        let mean = |of: fn(&Self) -> f64| costs.iter().map(of).sum::<f64>() / count;
        (!costs.is_empty()).then(|| Self {
            stall: mean(|it| it.stall),
            durable: mean(|it| it.durable),
            concurrent: costs.iter().all(|it| it.concurrent),
        })
    }
}

/// Where an interval comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Formula {
    /// The user's choice.
    Fixed,
    /// Appendix A.1 of the `PhoenixOS` paper.
    Concurrent,
    /// As long as a checkpoint takes, which is longer than the best interval would be.
    Busy,
    /// Daly's.
    Daly,
}

impl Formula {
    /// What people read.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Concurrent => "PhoenixOS A.1",
            Self::Busy => "as often as checkpoints end",
            Self::Daly => "Daly",
        }
    }
}

/// An interval and its figures.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// Seconds from the beginning of one checkpoint to that of the next.
    pub interval: f64,
    /// Where it comes from.
    pub formula: Formula,
    /// The expected part of the job's time that is lost.
    pub loss: f64,
}

impl Choice {
    /// The interval.
    #[must_use]
    pub fn interval(&self) -> Duration {
        Duration::try_from_secs_f64(self.interval).unwrap_or(LONGEST).clamp(SHORTEST, LONGEST)
    }
}

/// The best interval for a job that fails every `mtbf` seconds on average, with the seconds of a restore.
#[must_use]
pub fn choose(cost: Cost, mtbf: f64, restore: f64) -> Choice {
    let (best, formula) = if cost.concurrent {
        ((2.0 * cost.stall * mtbf).sqrt(), Formula::Concurrent)
    } else {
        (daly(cost.stall, mtbf), Formula::Daly)
    };
    let (interval, formula) = if best < cost.durable { (cost.durable, Formula::Busy) } else { (best, formula) };
    let interval = interval.clamp(SHORTEST.as_secs_f64(), LONGEST.as_secs_f64());
    Choice { interval, formula, loss: loss(cost, mtbf, restore, interval) }
}

/// An interval that the user has chosen, with what it costs.
#[must_use]
pub fn fixed(interval: Duration, cost: Option<Cost>, mtbf: f64, restore: f64) -> Choice {
    let interval = interval.as_secs_f64();
    let loss = cost.map_or(0.0, |cost| loss(cost, mtbf, restore, interval));
    Choice { interval, formula: Formula::Fixed, loss }
}

/// The part of the job's time that is lost, to first order.
fn loss(cost: Cost, mtbf: f64, restore: f64, interval: f64) -> f64 {
    (cost.stall / interval + (interval / 2.0 + cost.durable + restore) / mtbf).min(1.0)
}

/// Daly's interval, from the beginning of one checkpoint to that of the next: his is the time of work between them.
fn daly(cost: f64, mtbf: f64) -> f64 {
    if cost >= 2.0 * mtbf {
        return mtbf + cost;
    }
    let part = cost / (2.0 * mtbf);
    (2.0 * cost * mtbf).sqrt() * (1.0 + part.sqrt() / 3.0 + part / 9.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times between failures, exponentially distributed with mean 1: the same for every interval that is compared.
    fn failures(count: usize) -> Vec<f64> {
        let mut state = 0x5eed_u64;
        let mut uniform = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut x = state;
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((x ^ (x >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
        };
        (0..count).map(|_| -(1.0 - uniform()).ln()).collect()
    }

    /// The time that a job takes through all these failures, over the work that is left of it: what it loses. The job runs from
    /// an image or the beginning until it fails; it then has the work of the last image that was durable.
    fn simulated(cost: Cost, mtbf: f64, restore: f64, interval: f64, failures: &[f64]) -> f64 {
        let (mut time, mut work) = (0.0, 0.0);
        for until in failures {
            let until = until * mtbf;
            // Checkpoint k begins at k × interval, and has the work that was done by then: all but the stalls before.
            let images = ((until - cost.durable) / interval).floor().max(0.0);
            work += images * (interval - cost.stall);
            time += until + restore;
        }
        time / work - 1.0
    }

    /// The least loss that a fine search finds. Checkpoints do not overlap.
    fn best(cost: Cost, mtbf: f64, restore: f64, failures: &[f64]) -> f64 {
        let from = cost.durable.max(cost.stall) * 1.001;
        let steps = 150;
        let ratio = (mtbf * 20.0 / from).max(2.0);
        let intervals = (0..=steps).map(|step| from * ratio.powf(f64::from(step) / f64::from(steps)));
        intervals.map(|it| simulated(cost, mtbf, restore, it, failures)).filter(|it| *it > 0.0).fold(f64::MAX, f64::min)
    }

    #[test]
    fn the_chosen_interval_loses_at_most_a_twentieth_more_than_the_best_that_a_search_finds() {
        let failures = failures(10_000);
        let mut compared = 0;
        for mtbf in [600.0, 3_600.0, 43_200.0, 500_000.0] {
            for restore in [1.0, 30.0] {
                for stall in [0.01, 0.2, 3.0, 20.0] {
                    for durable in [1.0, 4.0, 40.0] {
                        let concurrent = Cost { stall, durable: durable + stall, concurrent: true };
                        let stopping = Cost { stall: stall + durable, durable: stall + durable, concurrent: false };
                        for cost in [concurrent, stopping] {
                            let chosen = choose(cost, mtbf, restore);
                            let lost = simulated(cost, mtbf, restore, chosen.interval.max(cost.durable), &failures);
                            let least = best(cost, mtbf, restore, &failures);
                            assert!(
                                lost <= 1.05 * least,
                                "{cost:?}, a failure in {mtbf} s: {chosen:?} loses {lost:.5}, the best interval {least:.5}"
                            );
                            compared += 1;
                        }
                    }
                }
            }
        }
        assert_eq!(compared, 4 * 2 * 4 * 3 * 2);
    }

    #[test]
    fn a_simulation_of_another_interval_loses_more() {
        let failures = failures(20_000);
        let cost = Cost { stall: 0.2, durable: 4.0, concurrent: true };
        let chosen = choose(cost, 3_600.0, 1.0);
        let at = |interval| simulated(cost, 3_600.0, 1.0, interval, &failures);
        for factor in [0.25, 4.0] {
            assert!(at(chosen.interval * factor) > 1.05 * at(chosen.interval), "{factor}");
        }
        let (expected, found) = (chosen.loss, at(chosen.interval));
        assert!((expected / found - 1.0).abs() < 0.1, "{expected} was said, and {found} is lost");
    }

    #[test]
    fn a_concurrent_checkpoint_is_made_more_often_than_one_that_stops() {
        let interval = |stall, concurrent| choose(Cost { stall, durable: 8.0, concurrent }, 3_600.0, 1.0).interval;
        // The paper's figures: √(2·O·M).
        assert!((interval(0.05, true) - (2.0_f64 * 0.05 * 3_600.0).sqrt()).abs() < 1e-9);
        assert!(interval(8.0, false) > 10.0 * interval(0.05, true));
        let busy = choose(Cost { stall: 0.001, durable: 60.0, concurrent: true }, 60.0, 1.0);
        assert_eq!((busy.interval, busy.formula), (60.0, Formula::Busy));
    }

    #[test]
    fn odd_figures_lead_to_no_odd_interval() {
        for stall in [0.0, 1e-9, 1e9, f64::MAX] {
            for mtbf in [1e-9, 1.0, 1e12] {
                for concurrent in [true, false] {
                    let chosen = choose(Cost { stall, durable: stall, concurrent }, mtbf, 0.0);
                    assert!((SHORTEST..=LONGEST).contains(&chosen.interval()), "{chosen:?}");
                    assert!((0.0..=1.0).contains(&chosen.loss), "{chosen:?}");
                }
            }
        }
        assert_eq!(Cost::mean([]), None);
    }
}

//! Random numbers that can be repeated after a test has failed.

use std::time::{SystemTime, UNIX_EPOCH};

/// The variable for the number of repetitions of tests with random values.
const SOAK: &str = "REKINDLE_SOAK";
/// The variable for the seed: the value that a failed test printed repeats the test.
const VARIABLE: &str = "REKINDLE_E2E_SEED";

/// A generator (splitmix64).
#[derive(Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// Makes a generator with the seed `REKINDLE_E2E_SEED`, or one from the clock, and prints the seed. The output of a
    /// test that passes is not shown.
    pub fn new() -> Self {
        let given = std::env::var(VARIABLE).ok().and_then(|text| text.parse().ok());
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        let state = given.unwrap_or(clock);
        eprintln!("{VARIABLE}={state} repeats this");
        Self { state }
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.state;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % limit
    }
}

/// The number of times to run a test with random values.
pub fn repetitions() -> u64 {
    std::env::var(SOAK).ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

impl Default for Random {
    fn default() -> Self {
        Self::new()
    }
}

//! Waiting for conditions.

use std::time::{Duration, Instant};

use anyhow::bail;

use crate::Result;

/// Only a failing test waits this long: on a busy machine every step takes several times as long.
const TIMEOUT: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(5);

/// Calls `look` until it returns a value. `what` names the condition in the error of a failing test.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if Instant::now() >= deadline {
            bail!("waited {} s, and it did not happen: {what}", TIMEOUT.as_secs());
        }
        std::thread::sleep(POLL);
    }
}

/// Like [`until`], for a plain condition.
pub fn until_true(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result {
    until(what, || Ok(holds()?.then_some(())))
}

//! Time limits with their settings: an error that names both tells an operator what to change.

use std::fmt;
use std::time::{Duration, Instant};

/// The longest time that something may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    pub(crate) time: Duration,
    /// The setting of the configuration; none where the limit is fixed.
    setting: Option<&'static str>,
}

impl Limit {
    /// A limit that nobody configures.
    pub(crate) const fn fixed(time: Duration) -> Self {
        Self { time, setting: None }
    }

    /// The limit from a setting.
    pub(crate) const fn configured(time: Duration, setting: &'static str) -> Self {
        Self { time, setting: Some(setting) }
    }

    /// Starts the limit now.
    pub(crate) fn begins(self) -> Deadline {
        self.began(Instant::now())
    }

    /// Starts the limit at this moment.
    pub(crate) fn began(self, since: Instant) -> Deadline {
        // A time too long to be added never ends.
        Deadline { at: since.checked_add(self.time), limit: self }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ms", self.time.as_millis())?;
        match self.setting {
            Some(setting) => write!(f, " ({setting})"),
            None => Ok(()),
        }
    }
}

/// The moment at which a limit is over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    at: Option<Instant>,
    pub(crate) limit: Limit,
}

impl Deadline {
    /// The time that is left: zero when the limit is over.
    pub(crate) fn left(&self) -> Duration {
        self.at.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether no time is left.
    pub(crate) fn is_over(&self) -> bool {
        self.left().is_zero()
    }
}

impl From<Limit> for Deadline {
    fn from(limit: Limit) -> Self {
        limit.begins()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_names_its_setting_and_a_deadline_ends() {
        let limit = Limit::configured(Duration::from_millis(300), "some_ms");
        assert_eq!(limit.to_string(), "300 ms (some_ms)");
        assert_eq!(Limit::fixed(Duration::from_secs(1)).to_string(), "1000 ms");
        assert!(Limit::fixed(Duration::ZERO).begins().is_over());
        assert!(!Limit::fixed(Duration::MAX).begins().is_over());
        let (limit, now) = (Limit::fixed(Duration::from_secs(60)), Instant::now());
        assert!(limit.began(now).left() > Duration::from_secs(50));
        assert!(now.checked_sub(limit.time).is_some_and(|since| limit.began(since).is_over()));
    }
}

//! The reporting modes, as the daemon passes them to a worker on its command line.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// What a worker reports of its client's accesses to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reporting {
    /// Writes that were not predicted; so many bytes are hashed at most. See `access/observe.rs`.
    Writes {
        /// In bytes.
        limit: u64,
    },
    /// Reads that were not predicted, and when memory was used first. See `access/reads.rs`.
    Reads,
}

/// The text names no mode.
#[derive(Debug, Error)]
#[error("neither `reads` nor a number of bytes")]
pub struct NoMode;

const READS: &str = "reads";

impl fmt::Display for Reporting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Writes { limit } => limit.fmt(f),
            Self::Reads => f.write_str(READS),
        }
    }
}

impl FromStr for Reporting {
    type Err = NoMode;

    fn from_str(text: &str) -> Result<Self, NoMode> {
        match text {
            READS => Ok(Self::Reads),
            bytes => bytes.parse().map(|limit| Self::Writes { limit }).map_err(|_| NoMode),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_passed_on() {
        for mode in [Reporting::Reads, Reporting::Writes { limit: 1 << 40 }] {
            assert_eq!(mode.to_string().parse::<Reporting>().unwrap(), mode);
        }
        assert!("writes".parse::<Reporting>().is_err() && "-1".parse::<Reporting>().is_err());
    }
}

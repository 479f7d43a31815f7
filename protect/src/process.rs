//! Processes that a protection knows.

use serde::{Deserialize, Serialize};

/// A process, told from a later one with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// When it was started, in ticks since the machine was.
    pub started: u64,
}

impl Process {
    /// A process that was there before the machine was started again: whatever has its number now is another one.
    #[must_use]
    pub fn of_former_boot(pid: i32) -> Self {
        Self { pid, started: u64::MAX }
    }

    /// Whether it is such a process.
    #[must_use]
    pub fn is_of_former_boot(&self) -> bool {
        self.started == u64::MAX
    }
}

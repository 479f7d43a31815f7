//! What CRIU is answered.

use std::os::fd::RawFd;

/// A hook's success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Taken care of.
    Done,
    /// Taken care of, by this descriptor.
    Descriptor(RawFd),
    /// CRIU may ask another plugin, or do as it does without plugins.
    NotOurs,
}

impl Answer {
    /// By whether it was ours.
    pub fn ours(ours: bool) -> Self {
        if ours { Self::Done } else { Self::NotOurs }
    }
}

/// How the process goes on after `exit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// CRIU continues.
    Return,
    /// CRIU ends at once and unsuccessfully.
    Process,
}

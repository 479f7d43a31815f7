//! The results that hooks return to CRIU.

use std::os::fd::RawFd;

/// The result of a hook that succeeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The plugin has handled the call.
    Done,
    /// The plugin has handled the call; this descriptor is the result.
    Descriptor(RawFd),
    /// CRIU may ask another plugin, or do as it does without plugins.
    NotOurs,
}

impl Answer {
    /// [`Answer::Done`] or [`Answer::NotOurs`].
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

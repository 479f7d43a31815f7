//! Fragments: lanes of a warp that are at the same instruction, and the reasons why they stop there.

/// A caller's state, while a function it called runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) pc: u32,
    pub(super) words: u32,
    pub(super) stack: u32,
    pub(super) site: u32,
}

/// The reason why a fragment cannot run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Ready,
    /// At the collective instruction at its `pc`.
    Collective,
    /// At the barrier instruction at its `pc`.
    Barrier(u32),
}

/// Lanes of a warp that are at the same place.
#[derive(Debug, Clone)]
pub(super) struct Fragment {
    pub(super) mask: u32,
    pub(super) pc: u32,
    /// The offset of the function's registers in the warp's words.
    pub(super) words: u32,
    /// The offset of the function's variables on each lane's stack.
    pub(super) stack: u32,
    pub(super) frames: Vec<Frame>,
    pub(super) state: State,
    /// The time of its last run: the oldest fragment gets the next turn when time is up.
    pub(super) ran: u64,
}

impl Fragment {
    pub(super) fn joins(&self, other: &Fragment) -> bool {
        self.pc == other.pc && self.words == other.words && self.stack == other.stack && self.frames == other.frames
    }
}

/// The reason why a fragment stopped running.
pub(super) enum Pause {
    /// Other fragments may have to run: this one diverged, returned, or met them.
    Reschedule,
    Quantum,
    /// The fragment waits; its state has the reason.
    Waits,
    /// The fragment has no lanes left.
    Gone,
    Fault,
}

//! Lanes of a warp that are at the same place, and why they stop there.

/// A caller's state, while a function it called runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) pc: u32,
    pub(super) words: u32,
    pub(super) stack: u32,
    pub(super) site: u32,
}

/// What keeps a fragment from running.
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
    /// Where the function's registers begin among the warp's words.
    pub(super) words: u32,
    /// Where the function's variables begin on each lane's stack.
    pub(super) stack: u32,
    pub(super) frames: Vec<Frame>,
    pub(super) state: State,
    /// When it last ran: the oldest gets the next turn when time is up.
    pub(super) ran: u64,
}

impl Fragment {
    pub(super) fn joins(&self, other: &Fragment) -> bool {
        self.pc == other.pc && self.words == other.words && self.stack == other.stack && self.frames == other.frames
    }
}

/// Why a fragment stopped running.
pub(super) enum Pause {
    /// Others should be looked at: it diverged, returned, or met them.
    Reschedule,
    Quantum,
    /// It waits; its state says for what.
    Waits,
    /// It has no lanes left.
    Gone,
    Fault,
}

//! The barriers of a block: the number of arrived threads, and the result that they continue with.

use crate::exec::machine::{Action, BarrierOp, Inst};

/// A barrier.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Barrier {
    arrived: u32,
    /// The number in the instruction; all live threads if it has none.
    expected: Option<u32>,
    /// The number of true predicates.
    yes: u32,
    touched: bool,
}

impl Barrier {
    /// The result for threads that waited at an instruction.
    pub(crate) fn result(&self, inst: &Inst) -> u32 {
        let ones = |holds: bool| if holds { u32::MAX } else { 0 };
        match inst.action {
            Action::Barrier(BarrierOp::Count) => self.yes,
            Action::Barrier(BarrierOp::All) => ones(self.yes >= self.arrived),
            Action::Barrier(BarrierOp::Any) => ones(self.yes > 0),
            _ => 0,
        }
    }
}

/// The barriers of a block.
#[derive(Debug, Default)]
pub(crate) struct Barriers {
    barriers: [Barrier; 16],
    any: bool,
}

impl Barriers {
    /// Counts arriving lanes; false if there is no such barrier.
    pub(super) fn arrive(&mut self, id: u32, lanes: u32, expected: Option<u32>, predicate: u32) -> bool {
        let Some(barrier) = self.barriers.get_mut(id as usize) else { return false };
        barrier.arrived += lanes.count_ones();
        barrier.yes += predicate.count_ones();
        barrier.expected = expected;
        barrier.touched = true;
        self.any = true;
        true
    }

    /// Whether threads have arrived at a barrier that is not open.
    pub(crate) fn any(&self) -> bool {
        self.any
    }

    /// Opens the first barrier at which all of the block's `live` threads have arrived. Returns its number and its former
    /// state.
    pub(crate) fn open(&mut self, live: u32) -> Option<(u32, Barrier)> {
        // The barrier does not wait for threads that have ended, even where a count was given.
        let complete = |barrier: &Barrier| barrier.touched && barrier.arrived >= barrier.expected.unwrap_or(live);
        let id = self.barriers.iter().position(complete)?;
        let barrier = std::mem::take(&mut self.barriers[id]);
        self.any = self.barriers.iter().any(|barrier| barrier.touched);
        Some((id as u32, barrier))
    }
}

//! Execution: decoded instructions, and the state they work on.

pub(crate) mod access;
pub(crate) mod atomic;
pub(crate) mod bits;
pub(crate) mod block;
pub(crate) mod builtin;
pub(crate) mod carry;
pub(crate) mod cluster;
pub(crate) mod collective;
mod control;
pub(crate) mod convert;
pub(crate) mod copy;
pub(crate) mod core;
pub(crate) mod float;
mod fragment;
pub(crate) mod grid;
pub(crate) mod half;
pub(crate) mod int;
pub(crate) mod lanes;
pub(crate) mod packed;
pub(crate) mod round;
pub(crate) mod special;
pub(crate) mod texture;
pub(crate) mod warp;

use self::core::Core;

/// How many lanes a warp has.
pub(crate) const LANES: usize = 32;

/// Where a row of a register, a constant or a special register lies: two bits say in which region,
/// the rest counts words of four bytes.
pub(crate) type Row = u32;
/// Rows of the program's constants. (Those without any of these bits are the function's frame's.)
pub(crate) const CONSTANT: Row = 1 << 30;
/// Rows of the warp's special registers.
pub(crate) const SPECIAL: Row = 2 << 30;
/// The bits that count words.
pub(crate) const ROW_OFFSET: Row = (1 << 30) - 1;
/// No row: an operand that is not there, or `_`.
pub(crate) const NO_ROW: Row = u32::MAX;

/// What an instruction does to the lanes that execute it, other than move them on.
pub(crate) type Exec = for<'a, 'l> fn(&'a mut Core<'l>, &'a Inst) -> Flow;

/// Whether a warp goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flow {
    Next,
    /// [`Core::fault`] says what happened.
    Fault,
}

/// A decoded instruction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inst {
    pub(crate) action: Action,
    /// The guard's predicate row, or [`NO_ROW`].
    pub(crate) guard: Row,
    /// What the guard is exclusive-ored with: all ones if it is negated.
    pub(crate) guard_flip: u32,
    /// Destination.
    pub(crate) d: Row,
    /// Second destination (a predicate), or third or fourth source.
    pub(crate) e: Row,
    pub(crate) a: Row,
    pub(crate) b: Row,
    pub(crate) c: Row,
    /// Depends on the instruction: an offset of an address, a row, an index.
    pub(crate) imm: u64,
    /// The line of the text.
    pub(crate) line: u32,
}

/// What kind of instruction it is, as far as control goes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Action {
    /// Works on the lanes; then the next one follows.
    Run(Exec),
    /// Sets predicates, or a register, by a comparison.
    Compare(convert::Test),
    Branch(u32),
    /// The index of a table of targets; row `a` chooses.
    BranchTable(u32),
    /// The index of a call site.
    Call(u32),
    /// The index of a call site; row `a` holds the address.
    CallIndirect(u32),
    /// The index of a call site.
    Builtin(builtin::Builtin, u32),
    Return,
    Exit,
    Trap,
    Barrier(block::BarrierOp),
    /// At the barrier of the cluster.
    ClusterArrive,
    ClusterWait,
    Collective(collective::Collective),
    /// An index into the program's list of refusals.
    Refused(u32),
}

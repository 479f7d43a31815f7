//! Decoded instructions.

use super::core::{Core, Flow};
use super::row::Row;

/// The effect of an instruction on the lanes that execute it.
pub(crate) type Exec = for<'a, 'l> fn(&'a mut Core<'l>, &'a Inst) -> Flow;

/// A comparison, by which predicates are set or values chosen.
pub(crate) type Test = for<'a, 'l> fn(&'a Core<'l>, &'a Inst) -> u32;

/// A decoded instruction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inst {
    pub(crate) action: Action,
    /// The guard's predicate row, or [`NO_ROW`](super::row::NO_ROW).
    pub(crate) guard: Row,
    /// The mask by which the guard is exclusive-ored: all ones if it is negated.
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

/// The kind of an instruction, for the flow of control.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Action {
    /// Works on the lanes; then the next one follows.
    Run(Exec),
    /// Sets predicates, or a register, by a comparison.
    Compare(Test),
    Branch(u32),
    /// The index of a table of targets; row `a` chooses.
    BranchTable(u32),
    /// The index of a call site.
    Call(u32),
    /// The index of a call site; row `a` holds the address.
    CallIndirect(u32),
    /// The index of a call site.
    Builtin(Builtin, u32),
    Return,
    Exit,
    Trap,
    Barrier(BarrierOp),
    /// At the barrier of the cluster.
    ClusterArrive,
    ClusterWait,
    Collective(Collective),
    /// An index into the program's list of refusals.
    Refused(u32),
}

/// The kinds of barrier instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BarrierOp {
    Wait,
    /// Count, but do not wait.
    Arrive,
    /// Wait, and count predicates.
    Count,
    /// Wait, and tell whether all predicates hold.
    All,
    /// Wait, and tell whether any predicate holds.
    Any,
}

/// The operations that the lanes of a warp do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Collective {
    /// `bar.warp.sync`.
    Sync,
    ShuffleUp,
    ShuffleDown,
    ShuffleXor,
    ShuffleIndex,
    VoteAll,
    VoteAny,
    VoteUniform,
    Ballot,
    /// Whether values have 64 bits.
    MatchAny(bool),
    MatchAll(bool),
    Reduce(Reduction),
    Elect,
}

/// `redux.sync`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduction {
    Add,
    MinSigned,
    MaxSigned,
    MinUnsigned,
    MaxUnsigned,
    And,
    Or,
    Xor,
}

/// A function that the interpreter provides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Builtin {
    Print,
    AssertFail,
    Malloc,
    Free,
    /// Memory for the parameters of a kernel that is to be launched.
    ParameterBuffer,
    /// Launches a kernel.
    LaunchDevice,
    /// The last error of a launch; it is forgotten.
    LastError,
    PeekError,
    StreamCreate,
    StreamDestroy,
    /// Sets the value that a conditional node of the running graph looks at.
    SetConditional,
}

/// The arguments and the result of a builtin, by their sizes.
pub(crate) struct Signature {
    pub(crate) arguments: &'static [u64],
    pub(crate) result: Option<u64>,
}

impl Builtin {
    /// What a caller must pass, and gets.
    pub(crate) fn signature(self) -> Signature {
        let (arguments, result): (&[u64], _) = match self {
            Builtin::Print => (&[8, 8], Some(4)),
            Builtin::AssertFail => (&[8, 8, 4, 8, 8], Some(4)),
            Builtin::Malloc => (&[8], Some(8)),
            Builtin::Free => (&[8], Some(4)),
            Builtin::ParameterBuffer => (&[8, 12, 12, 4], Some(8)),
            Builtin::LaunchDevice => (&[8, 8], Some(4)),
            Builtin::LastError | Builtin::PeekError => (&[], Some(4)),
            Builtin::StreamCreate => (&[8, 4], Some(4)),
            Builtin::StreamDestroy => (&[8], Some(4)),
            Builtin::SetConditional => (&[8, 4], None),
        };
        Signature { arguments, result }
    }

    /// The function of that name.
    pub(crate) fn named(name: &str) -> Option<Builtin> {
        Some(match name {
            "vprintf" => Builtin::Print,
            "__assertfail" => Builtin::AssertFail,
            "malloc" => Builtin::Malloc,
            "free" => Builtin::Free,
            "__cudaCDP2GetParameterBufferV2" => Builtin::ParameterBuffer,
            "__cudaCDP2LaunchDeviceV2" => Builtin::LaunchDevice,
            "__cudaCDP2GetLastError" => Builtin::LastError,
            "__cudaCDP2PeekAtLastError" => Builtin::PeekError,
            "__cudaCDP2StreamCreateWithFlags" => Builtin::StreamCreate,
            "__cudaCDP2StreamDestroy" => Builtin::StreamDestroy,
            "cudaGraphSetConditional" => Builtin::SetConditional,
            _ => return None,
        })
    }
}

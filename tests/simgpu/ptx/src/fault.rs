//! Errors: in the text, in linking, and in a launch.

use thiserror::Error;

/// The text is not PTX that this crate understands.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("line {line}: {what}")]
pub struct ParseError {
    /// The line, counted from one.
    pub line: u32,
    /// The error.
    pub what: String,
}

/// Why a module cannot be made into a program at all.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LinkError {
    /// A variable has no address, or no module defines the name.
    #[error("symbol {0} has no address")]
    Undefined(String),
}

/// A kernel uses something this interpreter does not execute. Other kernels of its module may run.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{function}, line {line}: {what}")]
pub struct Unsupported {
    /// The function that holds the instruction; not always the kernel itself.
    pub function: String,
    /// The line of the PTX text.
    pub line: u32,
    /// The instruction, or the part of it that is not supported.
    pub what: String,
}

/// Why an access, an instruction or a launch failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FaultKind {
    /// Nothing is mapped there (CUDA error 700), or the access leaves its shared or local memory.
    #[error("illegal address")]
    Unmapped,
    /// A write where only reads are allowed (CUDA error 700).
    #[error("write to read-only memory")]
    ReadOnly,
    /// The address is not a multiple of the access's size (CUDA error 716).
    #[error("misaligned address")]
    Misaligned,
    /// `trap` or `brkpt` was executed (CUDA error 719).
    #[error("trap")]
    Trap,
    /// An assertion failed (CUDA error 710); its text went to the print sink.
    #[error("device-side assert")]
    Assert,
    /// An indirect call of an address that is no function, or of a function of the wrong shape (CUDA error 718).
    #[error("invalid program counter")]
    BadCall,
    /// Recursion used up the thread's stack (CUDA error 719).
    #[error("stack overflow")]
    StackOverflow,
    /// No thread of a block can ever run again: they wait for each other (a real GPU would hang).
    #[error("deadlock: {0}")]
    Deadlock(String),
    /// The launch itself is wrong: dimensions, parameter size, unknown kernel (CUDA error 1 or 9).
    #[error("invalid launch: {0}")]
    InvalidLaunch(String),
    /// The kernel uses an instruction that this interpreter does not execute.
    #[error("unsupported: {0}")]
    Unsupported(Unsupported),
    /// [`Env::cancel`](crate::Env::cancel) was set.
    #[error("cancelled")]
    Cancelled,
}

/// An access that failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{kind} at {addr:#x}")]
pub struct Fault {
    /// The kind of failure.
    pub kind: FaultKind,
    /// The address of the access; zero where none is involved.
    pub addr: u64,
}

/// A launch that ended early.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{kernel}: {fault} (block {block:?}, thread {thread:?}, line {line})")]
pub struct LaunchFault {
    /// The kernel that was launched.
    pub kernel: String,
    /// The failure.
    pub fault: Fault,
    /// The line of the PTX text that was being executed; zero where none was.
    pub line: u32,
    /// `%ctaid` of the thread that failed.
    pub block: [u32; 3],
    /// `%tid` of the first thread that failed.
    pub thread: [u32; 3],
}

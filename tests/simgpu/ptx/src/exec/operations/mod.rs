//! The effects of instructions on the lanes that execute them, by family.
//!
//! Linking chooses the function of an instruction once, by its name and types. Executing it is then a call of that function
//! with the [`Core`](super::machine::Core) and the decoded instruction.

pub(crate) mod access;
pub(crate) mod atomic;
pub(crate) mod bits;
pub(crate) mod builtin;
pub(crate) mod carry;
pub(crate) mod convert;
pub(crate) mod copy;
pub(crate) mod float;
pub(crate) mod half;
pub(crate) mod int;
pub(crate) mod packed;
pub(crate) mod rank;
pub(crate) mod round;
pub(crate) mod special;
pub(crate) mod texture;

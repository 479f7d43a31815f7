//! A checkpoint and a restore: what commands access, copies of memory, saved state.

pub(crate) mod access;
pub(crate) mod check;
pub(crate) mod copying;
pub(crate) mod engine;
pub(crate) mod load;
pub(crate) mod save;

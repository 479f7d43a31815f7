//! A checkpoint and a restore: what commands access, copies of memory, saved state.

pub(crate) mod access;
pub(crate) mod check;
pub(crate) mod copying;
pub(crate) mod engine;
pub mod failure;
pub(crate) mod load;
pub(crate) mod not_loaded;
pub(crate) mod save;
pub(crate) mod state;

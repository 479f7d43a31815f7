//! The life of the worker: its start, its loop, how it executes commands and serves the daemon's requests.

mod ahead;
pub(crate) mod channel;
mod code_files;
pub(crate) mod commands;
pub mod confinement;
pub(crate) mod crash;
pub(crate) mod deferral;
#[allow(non_snake_case, reason = "generated code names handles by their C types")]
pub(crate) mod executor;
#[cfg(test)]
pub(crate) mod fixture;
mod green;
mod keeper;
mod kernel_heap;
pub(crate) mod launch;
mod leave;
pub(crate) mod load;
mod managed;
pub(crate) mod poll;
pub(crate) mod refusal;
pub(crate) mod rehearsal;
pub mod rejoin;
pub(crate) mod replay;
pub(crate) mod request_loop;
mod restoring;
pub(crate) mod sandbox;
pub(crate) mod silence;
pub(crate) mod start;
pub(crate) mod state;
mod suspended;
mod title;

//! Native processes: those that use a GPU by NVIDIA's own driver library, without Rekindle's. The driver checkpoints them.
//!
//! ```text
//!   dump      Pause ─ find ─ lock all ─ freeze ─ checkpoint each ─ CRIU dumps ─┬─ killed: the image has their GPU memory in CRIU's pages
//!                                                                              └─ left running, or failed: restore, unlock each
//!   restore   CRIU makes the processes ─ restore, unlock each ─ they run
//! ```
//!
//! The driver does its part in a thread of the process itself, so that thread must run during each checkpoint and restore. CRIU has
//! stopped it by then, and traces it: its plugin lets the thread run meanwhile.
//!
//! - [`helper`]: the process that calls the driver; [`find`]: which processes are native; [`driver`]: what is asked about them
//! - [`held`]: the native processes of a dump, which are given back in every case
//! - [`records`], [`mod@recover`]: those of a daemon that was killed
//! - [`gpus`]: on which GPUs a restored process gets its memory back

mod driver;
mod error;
mod find;
mod gpus;
mod held;
mod helper;
mod records;
mod recover;

pub(crate) use self::driver::{Found, Native};
pub(crate) use self::error::NativeError;
pub(crate) use self::gpus::pairs;
pub(crate) use self::held::Held;
pub(crate) use self::recover::recover;

//! Predicts, before a command is executed, which memory it may read and write.
//!
//! ```text
//!   copy, memset, memory operation   exact: the units that their ranges lie in                   command
//!   kernel launch                    speculation from its parameters, at every launch            function, params
//!     (a) no signature                 every unit that an aligned 8-byte value lies in, written
//!     (b) mangled name                 so too, but what pointers to constants name is only read  signature
//!     (c) no layout, or was wrong      everything
//!   graph launch                     the union over its steps, found when made or changed        graph
//! ```
//!
//! This is PhoenixOS's speculation (SOSP'25, section 4.1), with the signature taken from the mangled name. A **unit** is an
//! allocation; of the client's own mappings, it is a run of them without a gap ([`units`]). A prediction can be wrong: a kernel
//! may find a pointer in memory. So nothing relies on predictions alone: a copy compares the content, as does the reporting
//! mode ([`observe`]; [`reads`] is its counterpart for reads), and a kernel that has made a mispredicted write is predicted to access everything from then on.
//!
//! Besides the memory that its parameters name, a kernel may write the variables of its own code, which it reaches by their
//! names. Not predicted are writes through surfaces, and through tensor maps that a restored client encoded before the restore.
//!
//! A [`tracker::Tracker`] is asked only while memory that is not copied yet must stay unchanged, or where the daemon's
//! configuration asks for a report. Otherwise the only cost is recording tensor maps.

pub(crate) mod bench;
pub(crate) mod client;
mod command;
mod function;
mod graph;
pub(crate) mod hash;
mod known;
pub(crate) mod mode;
pub(crate) mod observe;
mod params;
mod ranges;
pub(crate) mod reads;
pub(crate) mod set;
mod signature;
pub(crate) mod tracker;
mod units;

//! Which memory a command may read and write, known before it is executed.
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
//! This is PhoenixOS's speculation (SOSP'25, section 4.1), with the signature taken from the mangled name. A **unit**
//! is an allocation; of the client's own mappings, a run of them without a gap ([`units`]). A prediction can be wrong: a
//! kernel may find a pointer in memory. So nothing relies on it alone; who does compares the content ([`observe`]), and
//! a kernel that was wrong once names everything from then on.
//!
//! Besides what its parameters name, a kernel may write the variables of its own code, which it reaches by their names.
//! What it writes through surfaces, and through tensor maps that were that a restored client encoded before, it is not
//! known to.
//!
//! A [`tracker::Tracker`] is asked only while memory that is not copied yet must stay as it is, or where the daemon's configuration
//! asks for a report. Otherwise nothing here costs anything but the note of a tensor map.

pub(crate) mod bench;
pub(crate) mod client;
mod command;
mod function;
mod graph;
pub(crate) mod hash;
mod known;
pub(crate) mod observe;
mod params;
mod ranges;
pub(crate) mod set;
mod signature;
pub(crate) mod tracker;
mod units;

//! `rekindle cut`: one checkpoint of process trees on several hosts that talk to each other over TCP, as a job of MPI or of torchrun does.
//!
//! ```text
//!   rekindle cut make (make.rs)         each host: rekindle cut-part (part/dump.rs)
//!   Make, Look, Dump ──────────────────► criu dump: the tree stands still, and no packet reaches it
//!        ◄──────────────────── Dumped    CRIU waits in its script (part/gate.rs)
//!   all are dumped: Look ──────────────► are there connections of which the images do not have all (between.rs)?
//!   there are none: Go ────────────────► the tree goes on, or stands still by SIGSTOP if it is to be killed
//!        ◄─────────────────── Durable    the part is complete, with a note of which cut it is
//!   all are: the manifest is written, and the cut is good
//!   Good, or End ──────────────────────► done; or the tree is killed
//!
//!   rekindle cut restore (restore.rs)   each host: rekindle cut-part (part/restore.rs)
//!   Restore ───────────────────────────► looks whether its part is there, whole, and of this cut
//!        ◄─────────────────── Checked
//!   all are: Start ────────────────────► locks the connections; criu restore
//!        ◄──────────────────── Placed    all processes and sockets are there
//!   all are: Connect ──────────────────► unlocks them; GPU memory is loaded
//!        ◄────────────────────── Held    the tree is complete, and does not run
//!   all are: Run ──────────────────────► it runs
//!        ◄─────────────────── Running
//!   all do: Done
//! ```
//!
//! A TCP connection survives if neither end goes on before both have been dumped, and if no packet reaches a host on which its end is not
//! there yet. The first barrier of each conversation is there for that. What was on its way is in the sender's image, and the kernel sends
//! it again.
//!
//! If anything fails before a cut is good, all trees go on, and there is no cut. If anything fails before all trees of a restore run, none
//! of them does in the end: if the command dies after the first has begun to run, `rekindle cut settle` has ten minutes to see to that.
//! `model/` checks that for every order of steps, losses and deaths.

mod between;
mod make;
mod manifest;
#[cfg(test)]
mod model;
mod options;
mod part;
mod restore;
mod ring;
mod settle;
mod show;
mod talk;

pub(crate) use self::options::Options;
use self::options::Verb;
pub(crate) use self::part::{Gate, Guard, Part, gate, guard, part};
use crate::failure::Failure;

/// Makes, restores or shows a cut.
pub(crate) fn cut(options: &Options) -> Result<(), Failure> {
    match &options.verb {
        Verb::Make(options) => make::make(options),
        Verb::Restore(options) => restore::restore(options),
        Verb::Settle(options) => settle::settle(options),
        Verb::Show { dir, json } => show::show(dir, *json),
    }
}

//! `rekindle migrate`: moves a process and its descendants to another host while they run.
//!
//! ```text
//!   source (source.rs)                                        target (target.rs)
//!   its own memory (memory.rs), while it runs  ── streams ──► pages, which the last image need not bring again
//!   rounds (rounds.rs): pre-copy while it runs ── streams ──► images that build on each other, loaded meanwhile (preload.rs)
//!   criu dump: it stands still (frozen.rs)     ── streams ──► the last one ─► criu restore: it is held
//!   the daemon hands it over                   ── Own ──────► it runs
//!   CRIU kills what is left
//! ```
//!
//! The daemon of the source decides, once, on which host the processes go on (`ctx-daemon/src/daemon/migrate/`), and the target
//! holds them until it hears that. Whatever ends in between, at most one of the two runs, and one can always go on: before the
//! decision the source, after it the target, which has all that it needs by then. `model.rs` checks that for every order of
//! losses and deaths. Where the decision does not reach the target, `--settle` tells it (`settle.rs`).
//!
//! An address may move with processes, and their TCP connections with it (`leaving.rs`, `arriving.rs`, `guard.rs`).
//!
//! With `--lazy` the processes run before CRIU has read all of their own memory from the last image, which stays until then (`lazy_pages/moved.rs`).
//!
//! A container moves in the same way, with podman in the place of CRIU on both hosts (`container.rs`, `imported.rs`). podman works on
//! when CRIU has ended, so the container stands still by itself from then on, is frozen once it was handed over (`freezer.rs`), and
//! podman removes it when it runs elsewhere.

mod arriving;
mod compare;
mod container;
mod freezer;
mod frozen;
mod guard;
mod guarded;
mod held;
mod imported;
mod leaving;
pub(crate) mod link;
mod memory;
#[cfg(test)]
mod model;
mod numbers;
mod options;
mod parent;
mod place;
mod preload;
mod report;
mod rounds;
mod sending;
mod settle;
mod source;
mod stream;
pub(crate) mod talk;
mod target;
mod told;

pub(crate) use self::guard::{Guard, guard};
use self::link::Via;
pub(crate) use self::options::{Options, quoted};
use self::source::Source;
use crate::failure::Failure;
use crate::output;
use crate::tls::Service;

/// Moves processes, or is the other host of one who does.
pub(crate) fn migrate(options: &Options) -> Result<(), Failure> {
    if options.receive {
        return target::receive(options);
    }
    let way = |host: &str| match (&options.via, options.tls.words(host, Service::Migrate)) {
        (_, Some(words)) => Via::own(host, &words),
        (Some(command), None) => Ok(Via::command(host, command, &options.words_there())),
        (None, None) => Via::ssh(host, &options.words_there()),
    };
    if let Some([migration, host]) = options.settle.as_deref() {
        let said = settle::settle(options, &way(host)?, migration)?;
        return Ok(output::print(&format!("{said}\n"))?);
    }
    let (subject, host) = options.subject()?;
    let way = way(host)?;
    let (report, result) = Source::begin(options, &way, subject)?.migrate();
    if options.json {
        output::print_json(&report)?;
    } else if result.is_ok() {
        output::print(&report.text())?;
    }
    result
}

//! `rekindle migrate`: moves a process and its descendants to another host while they run.
//!
//! ```text
//!   source (source.rs)                                        target (target.rs)
//!   rounds (rounds.rs): pre-copy while it runs ── streams ──► images that build on each other
//!   criu dump: it stands still                 ── streams ──► the last one ─► criu restore: it is held
//!   the daemon hands it over                   ── Own ──────► it runs
//!   CRIU kills what is left
//! ```
//!
//! The daemon of the source decides, once, on which host the processes go on (`ctx-daemon/src/daemon/migrate/`), and the target
//! holds them until it hears that. Whatever ends in between, at most one of the two runs, and one can always go on: before the
//! decision the source, after it the target, which has all that it needs by then. `model.rs` checks that for every order of
//! losses and deaths. Where the decision does not reach the target, `--settle` tells it (`settle.rs`).

mod compare;
mod link;
#[cfg(test)]
mod model;
mod options;
mod parent;
mod report;
mod rounds;
mod settle;
mod source;
mod stream;
mod talk;
mod target;

use anyhow::anyhow;

use self::link::Via;
pub(crate) use self::options::Options;
use self::source::Source;
use crate::failure::Failure;
use crate::{output, protect};

/// Moves processes, or is the other host of one who does.
pub(crate) fn migrate(options: &Options) -> Result<(), Failure> {
    if options.receive {
        return target::receive(options);
    }
    let way = |host: &str| match &options.via {
        Some(command) => Ok(Via::command(host, command, &options.words_there())),
        None => Via::ssh(host, &options.words_there()),
    };
    if let Some([migration, host]) = options.settle.as_deref() {
        let said = settle::settle(&options.daemon.socket()?, &way(host)?, migration, options.take)?;
        return Ok(output::print(&format!("{said}\n"))?);
    }
    let (Some(pid), Some(host)) = (options.pid, &options.host) else {
        return Err(Failure::usage(anyhow!("give a process and a host")));
    };
    protect::must_not_be_protected(&options.daemon.socket()?, pid)?;
    let way = way(host)?;
    let (report, result) = Source::begin(options, &way, pid)?.migrate();
    if options.json {
        output::print_json(&report)?;
    } else if result.is_ok() {
        output::print(&report.text())?;
    }
    result
}

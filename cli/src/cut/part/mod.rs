//! One host of a cut: what `rekindle cut` runs there, with a connection as its input and output.

mod dump;
mod events;
mod firewall;
mod gate;
mod guard;
mod place;
mod restore;
mod seen;
mod spoken;
mod tree;

use anyhow::anyhow;
use clap::Args;
use rekindle_wire::control::FailureKind;

use self::events::Events;
pub(crate) use self::gate::{Gate, gate};
pub(crate) use self::guard::{Guard, guard};
use self::spoken::{answer, input};
use super::manifest::VERSION;
use super::talk::{FromPart, ToPart};
use crate::daemon;
use crate::failure::Failure;
use crate::migrate::talk;

/// The options of a host of a cut.
#[derive(Debug, Args)]
pub(crate) struct Part {
    #[command(flatten)]
    daemon: daemon::At,
}

/// Serves the connection that is this process's input and output.
pub(crate) fn part(options: &Part) -> Result<(), Failure> {
    // What ends a command on this host by its group or its terminal, as Ctrl-C does, does not end this, nor CRIU.
    let _ = rustix::process::setsid();
    let socket = options.daemon.socket()?;
    let mut input = input()?;
    let first = loop {
        match talk::receive::<ToPart>(&mut input).map_err(|error| anyhow!(error))? {
            ToPart::Ping => answer(&FromPart::Pong)?,
            first => break first,
        }
    };
    // Signs of life are answered whatever takes long.
    let events = Events::of_coordinator();
    let served = match first {
        ToPart::Make(make) => is_known(make.version).and_then(|()| dump::dump(&socket, &make, events)),
        ToPart::Restore(restore) => {
            is_known(restore.version).and_then(|()| restore::restore(&socket, &restore.which, events))
        }
        ToPart::Ask(which) => restore::state(&which).and_then(|it| answer(&FromPart::State(it))),
        ToPart::Settle { which, run } => restore::settle(&which, run).and_then(|it| answer(&it)),
        ToPart::Over(which) => restore::is_over(&which).and_then(|()| answer(&FromPart::Running)),
        ToPart::EndDumped(which) => dump::end(&which).and_then(|()| answer(&FromPart::Ended)),
        _ => Err(Failure::refused(anyhow!("a connection does not begin with this"))),
    };
    served.or_else(|failure| answer(&FromPart::failed(&failure)))
}

fn is_known(version: u32) -> Result<(), Failure> {
    if version == VERSION {
        return Ok(());
    }
    Err(Failure::of_kind(
        FailureKind::Version,
        anyhow!(
            "it speaks version {VERSION} of cuts, and the command version {version}: install one version of Rekindle on all hosts"
        ),
    ))
}

//! `rekindle migrate --settle`: the end of a migration whose connection was lost.
//!
//! The daemon of the source knows what was decided, and the target waits to hear it: if it holds the processes, they never run by
//! themselves. So whoever asks the one and tells the other settles it, at any time and any number of times. A container that runs
//! there by then is removed here.
//!
//! Processes that were let run there, and have ended at that very moment, may have run. Only somebody who knows that they have not can
//! have them restored once more (`--again`).

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use rekindle_wire::control::{MigrationState, Reply, Request};

use super::container;
use super::link::Way;
use super::options::Options;
use super::talk::{Remedy, ToSource, ToTarget};
use crate::daemon;
use crate::failure::Failure;

/// How long a host that does not answer is tried.
const TRIES: Duration = Duration::from_secs(30);
/// The pause between two tries.
const PAUSE: Duration = Duration::from_millis(500);

/// What the daemon here has decided about a migration.
pub(super) fn decision(socket: &Path, migration: &str) -> Result<MigrationState, Failure> {
    match daemon::ask(socket, &Request::Migration { migration: migration.to_owned() })? {
        Reply::Migration(state) => Ok(state),
        _ => Err(daemon::unexpected_answer().into()),
    }
}

/// Tells the target what was decided, until it answers or that lasts too long.
pub(super) fn tell(way: &dyn Way, migration: &str, own: bool, again: bool) -> Result<ToSource, Failure> {
    let message = ToTarget::Settle { migration: migration.to_owned(), own, again };
    let began = Instant::now();
    loop {
        let answer = way.open().and_then(|mut link| link.ask(&message).map_err(|error| anyhow!(error).into()));
        match answer {
            Err(_) if began.elapsed() < TRIES => std::thread::sleep(PAUSE),
            answer => return answer,
        }
    }
}

/// Tells the target what the daemon here has decided.
pub(super) fn settle(options: &Options, way: &dyn Way, migration: &str) -> Result<&'static str, Failure> {
    let (host, socket) = (way.host(), options.daemon.socket()?);
    let own = if options.take {
        true
    } else {
        match decision(&socket, migration)? {
            MigrationState::HandedOver => true,
            MigrationState::Kept => false,
            MigrationState::Undecided => {
                return Err(Failure::refused(anyhow!("migration {migration} goes on: its command decides")));
            }
            MigrationState::Unknown => {
                let take = options.settle_command(migration, host, &["--take"]);
                return Err(Failure::refused(anyhow!(
                    "the daemon here knows of no migration {migration} since this host has started. If it was one from here, its \
                     processes have ended with the host: `{take}` has them go on at {host}"
                )));
            }
        }
    };
    if own {
        container::freeze(migration);
    } else {
        container::settle(migration, false)?;
    }
    match (tell(way, migration, own, options.again)?, own) {
        (ToSource::Running, true) => {
            container::settle(migration, true)?;
            Ok("the processes run there")
        }
        (ToSource::Abandoned, false) => Ok("the processes go on here, and nothing of them is left there"),
        (ToSource::Failed { kind, reason, remedy, .. }, _) => {
            let remedy = advice(options, migration, host, remedy);
            Err(Failure::of_kind(kind, anyhow!("{host}: {reason}{remedy}")))
        }
        (other, _) => Err(anyhow!("{host} answers {other:?}: install one version of Rekindle on both hosts").into()),
    }
}

/// The end of a message about processes that do not run at the other host, where they belong: what to do.
pub(super) fn advice(options: &Options, migration: &str, host: &str, remedy: Remedy) -> String {
    match remedy {
        Remedy::None => String::new(),
        Remedy::Settle => format!(". `{}` tries again", options.settle_command(migration, host, &[])),
        Remedy::Again => format!(
            ". If they have done nothing there, `{}` restores them once more",
            options.settle_command(migration, host, &["--again"])
        ),
    }
}

//! `rekindle migrate --settle`: the end of a migration whose connection was lost.
//!
//! The daemon of the source knows what was decided, and the target waits to hear it: if it holds the processes, they never run by
//! themselves. So whoever asks the one and tells the other settles it, at any time and any number of times.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use rekindle_wire::control::{MigrationState, Reply, Request};

use super::link::Way;
use super::talk::{ToSource, ToTarget};
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
pub(super) fn tell(way: &dyn Way, migration: &str, own: bool) -> Result<ToSource, Failure> {
    let message = ToTarget::Settle { migration: migration.to_owned(), own };
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
pub(super) fn settle(socket: &Path, way: &dyn Way, migration: &str, take: bool) -> Result<&'static str, Failure> {
    let own = if take {
        true
    } else {
        match decision(socket, migration)? {
            MigrationState::HandedOver => true,
            MigrationState::Kept => false,
            MigrationState::Undecided => {
                return Err(Failure::refused(anyhow!("migration {migration} goes on: its command decides")));
            }
            MigrationState::Unknown => {
                return Err(Failure::refused(anyhow!(
                    "the daemon here knows of no migration {migration} since this host has started. If it was one from here, its \
                     processes have ended with the host: --take has them go on at {}",
                    way.host()
                )));
            }
        }
    };
    let host = way.host();
    match (tell(way, migration, own)?, own) {
        (ToSource::Running, true) => Ok("the processes run there"),
        (ToSource::Abandoned, false) => Ok("the processes go on here, and nothing of them is left there"),
        (ToSource::Failed { kind, reason, .. }, _) => Err(Failure::of_kind(kind, anyhow!("{host}: {reason}"))),
        (other, _) => Err(anyhow!("{host} answers {other:?}: install one version of Rekindle on both hosts").into()),
    }
}

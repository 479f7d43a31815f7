//! `rekindle migrate --settle`: the end of a migration whose connection was lost.
//!
//! The daemon of the source knows what was decided, and the target waits to hear it: if it holds the processes, they never run by
//! themselves. So whoever asks the one and tells the other settles it, at any time and any number of times. A container that runs
//! there by then is removed here.
//!
//! Processes that were let run there, and have ended at that very moment, may have run. Only somebody who knows that they have not can
//! have them restored once more (`--again`). And only somebody who knows that the target is lost, and has not let a container run, can
//! have that go on here, where it stands still (`--keep`).

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use rekindle_wire::control::{FailureKind, MigrationState, Reply, Request};

use super::container;
use super::leaving;
use super::link::Way;
use super::options::Options;
use super::talk::{Remedy, Settle, ToSource, ToTarget};
use crate::daemon;
use crate::failure::Failure;
use crate::output;

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
pub(super) fn tell(way: &dyn Way, decided: &Settle) -> Result<ToSource, Failure> {
    let message = ToTarget::Settle(decided.clone());
    let began = Instant::now();
    loop {
        let answer = way.open().and_then(|mut link| link.ask(&message).map_err(|error| anyhow!(error).into()));
        match answer {
            Err(_) if began.elapsed() < TRIES => std::thread::sleep(PAUSE),
            answer => return answer,
        }
    }
}

/// Says something to which the target answers that the processes run or have run.
fn expect_running(way: &dyn Way, message: &ToTarget) -> Result<(), Failure> {
    let host = way.host();
    match way.open()?.ask(message).map_err(|error| anyhow!(error))? {
        ToSource::Running => Ok(()),
        ToSource::Failed { kind, reason, .. } => Err(Failure::of_kind(kind, anyhow!("{host}: {reason}"))),
        other => Err(anyhow!("{host} answers {other:?}: install one version of Rekindle on both hosts").into()),
    }
}

/// Whether the processes run at the target, or have run there.
fn runs(way: &dyn Way, migration: &str) -> Result<bool, Failure> {
    match way.open()?.ask(&ToTarget::Runs { migration: migration.to_owned() }).map_err(|error| anyhow!(error))? {
        ToSource::Running => Ok(true),
        ToSource::Failed { kind: FailureKind::Refused, .. } => Ok(false),
        ToSource::Failed { kind, reason, .. } => Err(Failure::of_kind(kind, anyhow!("{}: {reason}", way.host()))),
        other => Err(anyhow!("{} answers {other:?}: install one version of Rekindle on both hosts", way.host()).into()),
    }
}

fn is_same(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Tells the target what the daemon here has decided.
pub(super) fn settle(options: &Options, way: &dyn Way, migration: &str) -> Result<&'static str, Failure> {
    let (host, socket) = (way.host(), options.daemon.socket()?);
    if options.keep {
        return keep(way, &socket, migration);
    }
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
                if let Some(other) = container::daemon_of(migration).filter(|it| !is_same(it, &socket)) {
                    return Err(Failure::refused(anyhow!(
                        "the daemon at {} decides about migration {migration}: name it by --socket",
                        other.display()
                    )));
                }
                let take = options.settle_command(migration, host, &["--take"]);
                return Err(Failure::refused(anyhow!(
                    "the daemon here knows of no migration {migration} since this host has started. If it was one from here, its \
                     processes have ended with the host: `{take}` has them go on at {host}"
                )));
            }
        }
    };
    // Before the note of it is gone.
    let container = container::id(migration);
    let decided = Settle { migration: migration.to_owned(), own, again: options.again, container };
    if own {
        let frozen = container::freeze(migration);
        frozen.map_err(|failure| {
            failure.but(format!("`{}` tries again", options.settle_command(migration, host, &[])))
        })?;
        if let Some((name, remove)) = container::started_anew(migration)?
            && !runs(way, migration)?
        {
            return Err(Failure::refused(anyhow!(
                "container {name} was started anew here after it was handed over, and the one that was handed over waits at {host}. To have \
                 that go on, remove the one here (`{remove}`), and settle the migration again"
            )));
        }
    }
    // Before the other host has the addresses.
    leaving::settle(migration, own)?;
    // The target is told also if podman fails here.
    let stays = if own { Ok(()) } else { container::settle(migration, false) };
    let answer = tell(way, &decided).map_err(|failure| match own {
        true => failure.but(format!("{host} does not answer{}", advice(options, migration, host, Remedy::Keep))),
        false => failure,
    })?;
    stays?;
    match (answer, own) {
        // Somebody has removed the container here, and so has said that it is not to be restored.
        (ToSource::Failed { remedy: Remedy::Again, .. }, true) if !options.again && container::is_gone(migration)? => {
            expect_running(way, &ToTarget::Ended { migration: migration.to_owned() })?;
            container::settle(migration, true)?;
            Ok("the container has run there, and has ended")
        }
        (ToSource::Running, true) => {
            let removed = container::settle(migration, true);
            removed.map_err(|failure| not_removed(options, migration, host, failure))?;
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

/// The container goes on here although it was handed over: somebody says that it has not gone on at the target, and never will.
fn keep(way: &dyn Way, socket: &Path, migration: &str) -> Result<&'static str, Failure> {
    let Some(container) = container::id(migration) else {
        return Err(Failure::refused(anyhow!(
            "nothing stands still here since migration {migration}: only a container does, and only until it is settled or the host starts anew"
        )));
    };
    if decision(socket, migration)? == MigrationState::Undecided {
        return Err(Failure::refused(anyhow!("migration {migration} goes on: its command decides")));
    }
    // If it can be told, it knows better than anybody.
    let decided = Settle { migration: migration.to_owned(), own: false, again: false, container: Some(container) };
    let answer =
        way.open().and_then(|mut link| link.ask(&ToTarget::Settle(decided)).map_err(|error| anyhow!(error).into()));
    match answer {
        Ok(ToSource::Abandoned) => {}
        Ok(ToSource::Failed { kind, reason, .. }) => {
            return Err(Failure::of_kind(kind, anyhow!("{}: {reason}", way.host())));
        }
        Ok(other) => {
            let host = way.host();
            return Err(anyhow!("{host} answers {other:?}: install one version of Rekindle on both hosts").into());
        }
        Err(failure) => output::warn(format_args!("{} does not answer, and may keep a copy: {failure}", way.host())),
    }
    match daemon::ask(socket, &Request::TakeBack { migration: migration.to_owned() })? {
        Reply::Migration(MigrationState::Kept) => container::settle(migration, false)?,
        _ => return Err(daemon::unexpected_answer().into()),
    }
    Ok("the container goes on here")
}

/// The failure to remove a container here that runs elsewhere.
pub(super) fn not_removed(options: &Options, migration: &str, host: &str, failure: Failure) -> Failure {
    let settle = options.settle_command(migration, host, &[]);
    failure.but(format!("the container runs at {host}, and is only to be removed here, as `{settle}` does"))
}

/// The end of a message about processes that do not run at the other host, where they belong: what to do.
pub(super) fn advice(options: &Options, migration: &str, host: &str, remedy: Remedy) -> String {
    match remedy {
        Remedy::None => String::new(),
        Remedy::Settle => format!(". `{}` tries again", options.settle_command(migration, host, &[])),
        Remedy::Keep if container::id(migration).is_some() => format!(
            ". If {host} has lost the container for good, and it has not run there and never will, `{}` has it go on here",
            options.settle_command(migration, host, &["--keep"])
        ),
        Remedy::Keep => String::new(),
        Remedy::Again => {
            let close = container::removal(migration).map_or_else(String::new, |remove| {
                let settle = options.settle_command(migration, host, &[]);
                format!(". If they have run to their end there, remove the container here (`{remove}`), and `{settle}` forgets it")
            });
            let again = options.settle_command(migration, host, &["--again"]);
            format!("{close}. If they have done nothing there, `{again}` restores them once more")
        }
    }
}

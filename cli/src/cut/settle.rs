//! `rekindle cut settle`: the end of a cut or of a restore whose command was lost.
//!
//! | what the hosts say of a restore | what they are told |
//! |---|---|
//! | each tree is complete, or runs | they run |
//! | a tree is not there | all end |
//! | all have run, as one of them knows | nothing ends: a tree that is not there has ended by itself |
//!
//! No record is needed for that, since a tree that has run for a moment may be ended and restored again: the images stay.
//!
//! A good cut that was to end its trees has them killed where they run on.

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};

use super::manifest::{Entry, Manifest};
use super::options::{Settle, Ways};
use super::ring;
use super::talk::{FromPart, State, ToPart, Which};
use crate::failure::Failure;
use crate::output;

/// How long a host that does not answer is tried.
const TRIES: Duration = Duration::from_secs(30);
/// The pause between two tries.
const PAUSE: Duration = Duration::from_millis(500);

/// Settles what was left.
pub(super) fn settle(options: &Settle) -> Result<(), Failure> {
    let dir = std::path::absolute(&options.dir).context("cannot tell the current directory")?;
    let manifest = Manifest::read(&dir)?;
    let said = match all(&options.ways, &manifest, None)? {
        Settled::Nothing if manifest.stopped => {
            end_dumped(&options.ways, &manifest)?;
            "no tree of the cut runs"
        }
        Settled::Nothing => "no restore of the cut waits",
        Settled::Run => "all trees of the cut run",
        Settled::Ended => "the restore was given up: none of its trees runs",
    };
    Ok(output::print(&format!("{said}\n"))?)
}

/// What has become of a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Settled {
    /// Nobody holds a tree.
    Nothing,
    Run,
    Ended,
}

/// Has all trees of a restore that are held run, or end; without an order as they are.
pub(super) fn all(ways: &Ways, manifest: &Manifest, order: Option<bool>) -> Result<Settled, Failure> {
    let which = |part: &Entry| Which { cut: manifest.cut.clone(), part: part.clone() };
    let mut states = Vec::new();
    for part in &manifest.parts {
        match tell(ways, &part.host, &ToPart::Ask(which(part)))? {
            FromPart::State(state) => states.push(state),
            other => return Err(unexpected(&part.host, &other)),
        }
    }
    let run = match order.map_or_else(|| decide(&states), Ok)? {
        run if states.iter().any(|it| is_there(*it)) => run,
        _ => return Ok(Settled::Nothing),
    };
    for (part, _) in manifest.parts.iter().zip(&states).filter(|(_, state)| is_there(**state)) {
        match tell(ways, &part.host, &ToPart::Settle { which: which(part), run })? {
            FromPart::Running if run => {}
            FromPart::Ended if !run => {}
            other => return Err(unexpected(&part.host, &other)),
        }
    }
    if !run {
        return Ok(Settled::Ended);
    }
    // Not before all have said that they run.
    for part in &manifest.parts {
        match tell(ways, &part.host, &ToPart::Over(which(part)))? {
            FromPart::Running => {}
            other => return Err(unexpected(&part.host, &other)),
        }
    }
    Ok(Settled::Run)
}

/// Whether there is something that may run or end.
fn is_there(state: State) -> bool {
    matches!(state, State::Restoring | State::Held | State::Running)
}

/// Whether trees in these states run, or end.
fn decide(states: &[State]) -> Result<bool, Failure> {
    if states.contains(&State::Restoring) {
        return Err(Failure::refused(anyhow!("a restore of the cut goes on: its command decides")));
    }
    Ok(states.contains(&State::Over) || !states.contains(&State::Gone))
}

/// Has the trees killed that a good cut was to end.
pub(super) fn end_dumped(ways: &Ways, manifest: &Manifest) -> Result<(), Failure> {
    for part in &manifest.parts {
        let which = Which { cut: manifest.cut.clone(), part: part.clone() };
        match tell(ways, &part.host, &ToPart::EndDumped(which))? {
            FromPart::Ended => {}
            other => return Err(unexpected(&part.host, &other)),
        }
    }
    Ok(())
}

/// Says something by a connection of its own, until it is answered or that lasts too long.
fn tell(ways: &Ways, host: &str, message: &ToPart) -> Result<FromPart, Failure> {
    let began = Instant::now();
    loop {
        match ring::ask(ways, host, message) {
            Err(_) if began.elapsed() < TRIES => std::thread::sleep(PAUSE),
            answer => return answer,
        }
    }
}

fn unexpected(host: &str, answer: &FromPart) -> Failure {
    anyhow!("{host} answers {answer:?}: install one version of Rekindle on all hosts").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_run_if_all_are_there_or_all_have_run_and_end_otherwise() {
        use State::{Gone, Held, Over, Restoring, Running};
        let runs = |states: [State; 2]| decide(&states).ok();
        assert_eq!([runs([Held, Held]), runs([Running, Held]), runs([Running, Running])], [Some(true); 3]);
        assert_eq!([runs([Held, Gone]), runs([Gone, Running])], [Some(false); 2]);
        // One has ended by itself.
        assert_eq!([runs([Over, Running]), runs([Running, Over]), runs([Over, Gone])], [Some(true); 3]);
        assert_eq!(runs([Restoring, Held]), None);
        let there = [Gone, Restoring, Held, Running, Over].map(is_there);
        assert_eq!(there, [false, true, true, true, false]);
    }
}

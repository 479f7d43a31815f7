//! `rekindle cut restore`: the coordinator of a restore.

use std::path::Path;

use anyhow::Context;
use serde::Serialize;

use super::manifest::{Manifest, VERSION};
use super::options::Restore;
use super::ring::Ring;
use super::settle;
use super::talk::{self, FromPart, ToPart, Which};
use crate::failure::Failure;
use crate::output;

/// What runs again.
#[derive(Serialize)]
struct Report<'a> {
    cut: &'a str,
    parts: Vec<Part<'a>>,
}

#[derive(Serialize)]
struct Part<'a> {
    host: &'a str,
    pid: i32,
    processes: usize,
}

/// Restores a cut.
pub(super) fn restore(options: &Restore) -> Result<(), Failure> {
    let dir = std::path::absolute(&options.dir).context("cannot tell the current directory")?;
    let manifest = Manifest::read(&dir)?;
    let mut ring = Ring::open(&options.ways, manifest.parts.iter().map(|it| it.host.as_str()))?;
    check(&manifest, &mut ring)?;
    // From now on something may be there that is to be undone.
    if let Err(failure) = run(&mut ring) {
        return Err(undo(options, &dir, &manifest, ring, failure));
    }
    ring.say_all(&ToPart::Done);
    let parts = manifest.parts.iter().map(|it| Part { host: &it.host, pid: it.root, processes: it.processes });
    let report = Report { cut: &manifest.cut, parts: parts.collect() };
    if options.json {
        output::print_json(&report)?;
    } else {
        let line = |it: &Part<'_>| format!("{}: {} processes from {} on run\n", it.host, it.processes, it.pid);
        output::print(&report.parts.iter().map(line).collect::<String>())?;
    }
    Ok(())
}

/// Looks whether all parts are there, before anything starts.
fn check(manifest: &Manifest, ring: &mut Ring) -> Result<(), Failure> {
    for part in &manifest.parts {
        let which = Which { cut: manifest.cut.clone(), part: part.clone() };
        ring.say(part.index, &ToPart::Restore(talk::Restore { version: VERSION, which }));
    }
    ring.hear_all(|it| matches!(it, FromPart::Checked).then_some(())).map(drop)
}

/// All phases until all trees run.
fn run(ring: &mut Ring) -> Result<(), Failure> {
    ring.ask_all(&ToPart::Start, |it| matches!(it, FromPart::Placed).then_some(()))?;
    ring.ask_all(&ToPart::Connect, |it| matches!(it, FromPart::Held).then_some(()))?;
    ring.ask_all(&ToPart::Run, |it| matches!(it, FromPart::Running).then_some(()))?;
    Ok(())
}

/// None of the trees is to run.
fn undo(options: &Restore, dir: &Path, manifest: &Manifest, mut ring: Ring, failure: Failure) -> Failure {
    ring.say_all(&ToPart::End);
    let doubtful = ring.give_up();
    if doubtful.is_empty() {
        return failure;
    }
    // By other connections.
    match settle::all(&options.ways, manifest, Some(false)) {
        Ok(_) => failure,
        Err(error) => failure.but(format!(
            "{} may have its tree still ({error}): `{}` ends it",
            doubtful.join(", "),
            options.ways.settle_command(dir)
        )),
    }
}

//! `rekindle cut make`: the coordinator of a cut.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow};
use serde::Serialize;

use super::between::Looks;
use super::manifest::{Entry, Manifest, VERSION};
use super::options::Make;
use super::ring::Ring;
use super::settle;
use super::talk::{self, FromPart, ToPart};
use crate::failure::Failure;
use crate::network::connection::Connection;
use crate::{output, random};

/// What was made.
#[derive(Serialize)]
struct Report {
    cut: String,
    parts: Vec<Part>,
    /// Connections that lead to no tree of the cut.
    outside: Vec<Connection>,
    /// Whether the trees were killed with it.
    stopped: bool,
}

#[derive(Serialize)]
struct Part {
    host: String,
    pid: i32,
    processes: usize,
    connections: usize,
    waited_ms: u64,
}

/// Makes a cut.
pub(super) fn make(options: &Make) -> Result<(), Failure> {
    let dir = std::path::absolute(&options.dir).context("cannot tell the current directory")?;
    let mut hosts = HashSet::new();
    if let Some((host, _)) = options.trees.iter().find(|(host, _)| !hosts.insert(host)) {
        return Err(Failure::usage(anyhow!("{host} is named twice: a host has one tree of a cut")));
    }
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    if Manifest::is_in(&dir) {
        return Err(Failure::refused(anyhow!("there is a cut in {} already: name another directory", dir.display())));
    }
    let cut = random::name()?;
    let mut ring = Ring::open(&options.ways, options.trees.iter().map(|(host, _)| host.as_str()))?;
    match gather(options, &dir, &cut, &mut ring) {
        Ok((manifest, report)) => finish(options, &dir, &manifest, report, ring),
        Err(failure) => {
            // All trees go on, and leave nothing.
            let left = ring.give_up();
            Err(match left.as_slice() {
                [] => failure,
                left => failure.but(format!(
                    "there is no cut; {} did not say that its tree goes on, as it does when it notices that it is not heard",
                    left.join(", ")
                )),
            })
        }
    }
}

/// All phases until the cut is good.
fn gather(options: &Make, dir: &Path, cut: &str, ring: &mut Ring) -> Result<(Manifest, Report), Failure> {
    for (index, (host, pid)) in options.trees.iter().enumerate() {
        let make = talk::Make {
            version: VERSION,
            cut: cut.to_owned(),
            index,
            host: host.clone(),
            dir: dir.join(host),
            pid: *pid,
            stop: options.stop,
            options: options.kept.options(),
        };
        ring.say(index, &ToPart::Make(make));
    }
    let seen = |it| if let FromPart::Seen(seen) = it { Some(seen) } else { None };
    let first = ring.hear_all(|it| if let FromPart::Ready(seen) = it { Some(seen) } else { None })?;
    let second = ring.ask_all(&ToPart::Look, seen)?;
    let dumped = ring.ask_all(&ToPart::Dump, |it| if let FromPart::Dumped(seen) = it { Some(seen) } else { None })?;
    let after = ring.ask_all(&ToPart::Look, seen)?;
    let looks = Looks { before: [first, second], dumped, after };
    if let Some((at, it)) = looks.torn() {
        let host = options.trees.get(at).map_or("", |(host, _)| host);
        return Err(Failure::refused(anyhow!(
            "a connection between the trees was opened or closed while the cut was made ({host}: {} to {}): try again",
            it.own,
            it.other
        )));
    }
    let durable = ring.ask_all(&ToPart::Go, |it| match it {
        FromPart::Durable { note, processes, waited_ms } => Some((note, processes, waited_ms)),
        _ => None,
    })?;
    let mut report = Report { cut: cut.to_owned(), parts: Vec::new(), outside: looks.outside(), stopped: options.stop };
    let mut parts = Vec::new();
    for (index, ((host, pid), (note, processes, waited_ms))) in options.trees.iter().zip(durable).enumerate() {
        let connections = looks.dumped.get(index).map_or(0, |it| it.connections.len());
        report.parts.push(Part { host: host.clone(), pid: *pid, processes, connections, waited_ms });
        parts.push(Entry { index, host: host.clone(), dir: dir.join(host), root: *pid, processes, note });
    }
    let made = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |it| it.as_secs());
    let manifest = Manifest { version: VERSION, cut: cut.to_owned(), made, stopped: options.stop, parts };
    manifest.write(dir)?;
    Ok((manifest, report))
}

/// The cut is good: tells the hosts, and has the trees killed if they are to be.
fn finish(options: &Make, dir: &Path, manifest: &Manifest, report: Report, mut ring: Ring) -> Result<(), Failure> {
    let mut ended = Ok(());
    if options.stop {
        if ring.ask_all(&ToPart::End, |it| matches!(it, FromPart::Ended).then_some(())).is_err() {
            drop(ring);
            ended = settle::end_dumped(&options.ways, manifest).map_err(|failure| {
                failure
                    .but(format!("the cut is good; a tree may run on: `{}` kills it", options.ways.settle_command(dir)))
            });
        }
    } else {
        ring.say_all(&ToPart::Good);
    }
    for it in &report.outside {
        output::warn(format_args!(
            "the connection {} to {} leads to no tree of the cut: a restore breaks it",
            it.own, it.other
        ));
    }
    if options.json {
        output::print_json(&report)?;
    } else {
        let line = |it: &Part| {
            let Part { host, pid, processes, connections, waited_ms } = it;
            format!(
                "{host}: {processes} processes from {pid} on, {connections} connections; waited for the others for {waited_ms} ms\n"
            )
        };
        let lines: String = report.parts.iter().map(line).collect();
        output::print(&format!("{lines}the cut in {} is good\n", dir.display()))?;
    }
    ended
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_name_is_one_of_a_cut() {
        assert_eq!(random::name().map(|it| super::super::manifest::is_name(&it)).ok(), Some(true));
    }
}

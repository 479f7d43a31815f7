//! Checkpoints of a pod's containers at one moment.
//!
//! ```text
//!   Together ─► a podman for each container ─► each CRIU freezes its tree, and waits in the daemon until all are frozen ─► images
//!                   └── one fails ─► this closes the connection, so the others fail too, and all trees go on
//! ```

use std::fs;
use std::path::Path;
use std::sync::mpsc;

use anyhow::anyhow;
use rekindle_images::Protocol;
use rekindle_wire::control::{FailureKind, Reply, Request};

use super::attempt::{Attempt, attempt, obstacles};
use super::maker::Maker;
use super::options::{Fate, Options};
use super::report::Report;
use crate::bar::Bar;
use crate::daemon::{self, Session};
use crate::failure::Failure;
use crate::{output, podman, span};

/// Checkpoints all running containers of a pod at one moment, or none of them.
pub(super) fn checkpoint(options: &Options, name: &str, socket: &Path) -> Result<(), Failure> {
    let engine = options.containers.engine();
    let pod = podman::Pod::find(&engine, name)?;
    let makers = pod.members().filter(|it| it.runs()).map(|it| Maker::of_container(options, &it.name, socket));
    let makers = makers.collect::<Result<Vec<_>, _>>()?;
    if makers.is_empty() {
        return Err(Failure::refused(anyhow!("no container of the pod {name} runs")));
    }
    let mut reports: Vec<_> = makers.iter().map(Report::of).collect();
    let mut refused = Vec::new();
    for (maker, report) in makers.iter().zip(&mut reports) {
        if let Some(processes) = obstacles(socket, maker.root())? {
            report.refused(processes);
            refused.push(maker.what());
            if !options.json {
                report.print()?;
            }
        }
    }
    if !refused.is_empty() {
        if options.json {
            output::print_json(&reports)?;
        }
        let whom = refused.join(", ");
        return Err(Failure::refused(anyhow!("the pod {name} cannot be checkpointed now, because of {whom}")));
    }
    let mut attempts = at_one_moment(&makers, options.protocol, socket)?;
    if attempts.iter().any(|it| it.as_ref().is_ok_and(Attempt::has_mispredicted))
        && options.protocol != Some(Protocol::Stop)
    {
        eprintln!("rekindle: a kernel wrote memory that was not predicted; trying again with protocol stop");
        reports.iter_mut().for_each(Report::again);
        attempts = at_one_moment(&makers, Some(Protocol::Stop), socket)?;
    }
    let (mut why, mut made) = (Vec::new(), Vec::new());
    for ((maker, report), attempt) in makers.iter().zip(&mut reports).zip(attempts) {
        // Those that have failed only because of another are not the reason.
        let follows = attempt.as_ref().is_ok_and(|it| it.kind() == FailureKind::Together);
        match attempt.and_then(|it| it.conclude(maker, report)) {
            Ok(()) => made.push(maker),
            Err(failure) => why.push((follows, failure)),
        }
        if !options.json {
            report.print()?;
        }
    }
    if options.json {
        output::print_json(&reports)?;
    }
    if why.is_empty() {
        return Ok(());
    }
    undo(options, &made);
    if why.iter().any(|(follows, _)| !follows) {
        why.retain(|(follows, _)| !follows);
    }
    let (_, failures): (Vec<_>, Vec<_>) = why.into_iter().unzip();
    let said: Vec<_> = failures.iter().map(ToString::to_string).collect();
    Err(Failure::of_several(&failures, anyhow!("there is no checkpoint of the pod {name}: {}", said.join("; "))))
}

/// Has podman checkpoint all of them. As soon as one fails, none of the others goes on.
fn at_one_moment(
    makers: &[Maker],
    protocol: Option<Protocol>,
    socket: &Path,
) -> Result<Vec<Result<Attempt, Failure>>, Failure> {
    let roots = makers.iter().map(Maker::root).collect();
    let (session, reply) = Session::open(socket, &Request::Together { roots })?;
    if reply != Reply::Awaited {
        return Err(daemon::unexpected_answer().into());
    }
    let mut group = Some(session);
    let span = span::begin();
    let (tell, hear) = mpsc::channel();
    let mut attempts: Vec<_> = std::thread::scope(|scope| {
        for (index, maker) in makers.iter().enumerate() {
            let tell = tell.clone();
            scope.spawn(move || {
                let attempt = attempt(socket, maker, protocol, None, (Bar::hidden(), span.and_then(span::again)));
                // Somebody hears as long as this thread runs.
                let _ = tell.send(Box::new((index, attempt)));
            });
        }
        drop(tell);
        hear.iter()
            .map(|told| {
                let (index, attempt) = *told;
                // A CRIU without Rekindle's plugin waits for nobody, and ends before the others are frozen.
                let goes_on =
                    attempt.as_ref().is_ok_and(|it| it.status.success()) && group.as_ref().is_some_and(all_were_frozen);
                if !goes_on {
                    group = None;
                }
                (index, attempt)
            })
            .collect()
    });
    attempts.sort_by_key(|(index, _)| *index);
    let all_succeed = attempts.iter().all(|(_, it)| it.as_ref().is_ok_and(|it| it.status.success()));
    if group.is_none() && all_succeed {
        let why = "podman has checkpointed the containers at different moments: its CRIU does not use Rekindle's plugin, or not that of \
                   this release; run `rekindle doctor`";
        return Err(anyhow!(why).into());
    }
    Ok(attempts.into_iter().map(|(_, attempt)| attempt).collect())
}

fn all_were_frozen(group: &Session) -> bool {
    matches!(group.ask(&Request::Progress), Ok(Reply::Together { all_were_frozen: true }))
}

/// Removes the archives of containers that run on, since they are no checkpoint of the pod. Those that podman has stopped are not
/// lost: podman failed only when all images were on disk.
fn undo(options: &Options, made: &[&Maker]) {
    for maker in made {
        match (options.fate(), maker.image()) {
            (Fate::Running, Some(archive)) => {
                let _ = fs::remove_file(archive);
            }
            (Fate::Running, None) => {}
            (_, archive) => {
                let place = archive.map(|it| format!(" in {}", it.display())).unwrap_or_default();
                eprintln!("rekindle: {} is stopped, and its checkpoint{place} is complete", maker.what());
            }
        }
    }
}

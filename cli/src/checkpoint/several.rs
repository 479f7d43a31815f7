//! Checkpoints of several containers, one after the other. One that fails does not stop the others.

use std::path::Path;

use anyhow::anyhow;
use rekindle_wire::control::{Reply, Request};

use super::attempt;
use super::maker::Maker;
use super::options::Options;
use super::report::Report;
use crate::failure::Failure;
use crate::{daemon, output};

/// Checkpoints the containers that are named, or all that use GPUs. Fails if one of them fails.
pub(super) fn checkpoint(options: &Options, socket: &Path) -> Result<(), Failure> {
    let names = if options.containers.all {
        with_gpu_processes(options, socket)?
    } else {
        options.containers.container.clone()
    };
    let (mut reports, mut failed) = (Vec::new(), Vec::new());
    let count = names.len();
    for name in names {
        let made = Maker::of_container(options, &name, socket).and_then(|maker| attempt::one(options, &maker, socket));
        let (report, result) = made.unwrap_or_else(|failure| (Report::unmade(&name, &failure), Err(failure)));
        if !options.json {
            report.print()?;
        }
        reports.push(report);
        if let Err(failure) = result {
            eprintln!("rekindle: {failure}");
            failed.push((name, failure));
        }
    }
    if options.json {
        output::print_json(&reports)?;
    } else if count == 0 {
        output::print("no running container has a process that uses a GPU through Rekindle\n")?;
    }
    if failed.is_empty() {
        return Ok(());
    }
    let (names, failures): (Vec<_>, Vec<_>) = failed.into_iter().unzip();
    let said = format!("{} of {count} containers are not checkpointed: {}", names.len(), names.join(", "));
    Err(Failure::of_several(&failures, anyhow!(said)))
}

/// The running containers with processes that use a GPU through Rekindle.
fn with_gpu_processes(options: &Options, socket: &Path) -> Result<Vec<String>, Failure> {
    let engine = options.containers.engine();
    let mut found = Vec::new();
    for name in engine.running()? {
        // A container that has ended since then has no processes.
        let Ok(pid) = engine.pid(&name) else { continue };
        match daemon::ask(socket, &Request::Check { pid }) {
            Ok(Reply::Checked(processes)) if processes.is_empty() => {}
            Ok(Reply::Checked(_)) => found.push(name),
            Ok(_) => return Err(daemon::unexpected_answer().into()),
            Err(failure) if engine.pid(&name).is_ok() => return Err(failure),
            Err(_) => {}
        }
    }
    Ok(found)
}

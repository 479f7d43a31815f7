//! `rekindle check`.

use std::fmt::Write;

use anyhow::{Context, anyhow};
use clap::Args;
use rekindle_wire::control::{CheckInfo, Reply, Request};
use serde::Serialize;

use crate::failure::Failure;
use crate::{daemon, output};

/// The options of `rekindle check`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The root of the process tree, as for `criu dump -t`
    pid: i32,
    #[command(flatten)]
    daemon: daemon::At,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The answer as JSON.
#[derive(Serialize)]
struct Report<'a> {
    checkpointable: bool,
    processes: &'a [CheckInfo],
}

/// Asks whether the tree can be checkpointed now.
pub(crate) fn check(options: &Options) -> Result<(), Failure> {
    let socket = options.daemon.socket()?;
    let Reply::Checked(processes) = daemon::ask(&socket, &Request::Check { pid: options.pid })? else {
        return Err(daemon::unexpected_answer().into());
    };
    let checkpointable = processes.iter().all(|it| it.reasons.is_empty());
    if options.json {
        output::print_json(&Report { checkpointable, processes: &processes })?;
    } else {
        output::print(&describe(options.pid, &processes).context("cannot describe the answer")?)?;
    }
    if checkpointable {
        return Ok(());
    }
    Err(Failure::refused(anyhow!("process {} cannot be checkpointed now", options.pid)))
}

pub(crate) fn describe(root: i32, processes: &[CheckInfo]) -> Result<String, std::fmt::Error> {
    let mut text = String::new();
    if processes.is_empty() {
        writeln!(text, "process {root}: no process of its tree uses a GPU")?;
    }
    for process in processes {
        let (name, memory) = (output::plain(&process.command), output::size(process.device_memory));
        let verdict =
            if process.reasons.is_empty() { "can be checkpointed now" } else { "cannot be checkpointed now:" };
        writeln!(text, "process {} ({name}), {memory} of GPU memory: {verdict}", process.pid)?;
        if !process.way.is_empty() {
            writeln!(text, "  {}", output::plain(&process.way))?;
        }
        for reason in &process.reasons {
            writeln!(text, "  {}", output::plain(reason))?;
        }
    }
    Ok(text)
}

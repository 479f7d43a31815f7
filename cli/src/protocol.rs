//! `rekindle protocol`.

use clap::Args;
use rekindle_images::Protocol;
use rekindle_wire::control::{ProtocolChange, Reply, Request};
use serde::Serialize;

use crate::failure::Failure;
use crate::{daemon, output};

/// The options of `rekindle protocol`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The process, as listed by `rekindle ps`
    pid: i32,
    /// auto, stop, clone, cow or recopy, until the process ends [default: only show the protocol]
    name: Option<Protocol>,
    /// Remove an earlier choice, so that the setting of the program, its container or the configuration applies
    #[arg(long, conflicts_with = "name")]
    forget: bool,
    #[command(flatten)]
    daemon: daemon::At,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The answer as JSON.
#[derive(Serialize)]
struct Report<'a> {
    pid: i32,
    protocol: &'a str,
    reason: &'a str,
}

/// Sets the protocol of a process if asked to, and prints the one that applies.
pub(crate) fn protocol(options: &Options) -> Result<(), Failure> {
    let socket = options.daemon.socket()?;
    let change = match options.name {
        Some(name) => ProtocolChange::Choose(name.as_str().to_owned()),
        None if options.forget => ProtocolChange::Forget,
        None => ProtocolChange::Keep,
    };
    let pid = options.pid;
    let Reply::Protocol { protocol, reason } = daemon::ask(&socket, &Request::Protocol { pid, change })? else {
        return Err(daemon::unexpected_answer().into());
    };
    if options.json {
        output::print_json(&Report { pid, protocol: &protocol, reason: &reason })?;
    } else {
        output::print(&format!("process {pid}: {}, by {}\n", output::plain(&protocol), output::plain(&reason)))?;
    }
    Ok(())
}

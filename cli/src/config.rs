//! `rekindle config`: the daemon's configuration file. The daemon's own program reads it, so the answer is the daemon's.

use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::anyhow;
use clap::{Args, Subcommand};

use crate::failure::Failure;

/// The daemon's program.
const DAEMON: &str = "rekindled";

/// The options of `rekindle config`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Say what is wrong with a configuration file, and what in it cannot work on this machine
    Check {
        /// The configuration file [default: /etc/rekindle/rekindled.toml]
        file: Option<PathBuf>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Becomes the daemon's program, which checks the file. Returns only on an error.
pub(crate) fn config(options: &Options) -> Result<(), Failure> {
    let Action::Check { file, json } = &options.action;
    let program = daemon_program();
    let mut command = Command::new(&program);
    command.arg("check-config").args(json.then_some("--json"));
    if let Some(file) = file {
        // After `--`, for a name that begins with a dash.
        command.arg("--").arg(file);
    }
    let error = command.exec();
    let absent = error.kind() == ErrorKind::NotFound;
    let advice = if absent { ", which reads its configuration: install all of Rekindle" } else { "" };
    Err(anyhow!(error).context(format!("cannot run {}{advice}", program.display())).into())
}

/// The program beside this one; otherwise its name, for which the system searches `PATH`.
fn daemon_program() -> PathBuf {
    // Links are resolved: /usr/local/bin/rekindle may lead into the built tree.
    let this = std::env::current_exe().and_then(|it| it.canonicalize());
    let beside = this.ok().and_then(|it| Some(it.parent()?.join(DAEMON)));
    beside.filter(|it| it.is_file()).unwrap_or_else(|| DAEMON.into())
}

//! `rekindle suspend` and `rekindle resume`.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use rekindle_wire::control::{Reply, Request, SuspendedInfo};

use crate::engine::Engine;
use crate::failure::Failure;
use crate::{daemon, output};

/// The processes that are suspended or resumed.
#[derive(Debug, Args)]
struct Which {
    /// The process; its descendants are taken with it
    #[arg(required_unless_present = "container")]
    pid: Option<i32>,
    /// Take this container of podman instead of a process
    #[arg(long, value_name = "NAME", conflicts_with = "pid")]
    container: Option<String>,
    /// The podman program [default: the one in PATH]
    #[arg(long, value_name = "PATH", requires = "container")]
    podman: Option<PathBuf>,
    #[command(flatten)]
    daemon: daemon::At,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The options of `rekindle suspend`.
#[derive(Debug, Args)]
pub(crate) struct Suspend {
    #[command(flatten)]
    which: Which,
    /// Keep the content of GPU memory in host memory (`memory`), or in unnamed files in this directory
    #[arg(long, value_name = "memory|DIR", default_value = "memory")]
    to: PathBuf,
    /// Have the processes' GPU commands wait until `rekindle resume`, instead of resuming with the next command
    #[arg(long)]
    hold: bool,
    /// Give back the CUDA contexts too. When a process resumes, another worker takes it over, on any GPUs of the same model
    /// that have room
    #[arg(long)]
    deep: bool,
}

/// The options of `rekindle resume`.
#[derive(Debug, Args)]
pub(crate) struct Resume {
    #[command(flatten)]
    which: Which,
}

impl Which {
    /// The process that all others descend from.
    fn root(&self) -> Result<i32, Failure> {
        match (self.pid, &self.container) {
            (Some(pid), _) => Ok(pid),
            (None, Some(name)) => Engine::podman(self.podman.as_deref()).pid(name),
            (None, None) => Err(anyhow::anyhow!("give a process, or --container").into()),
        }
    }

    fn ask(&self, request: &Request, directory: Option<&File>) -> Result<Reply, Failure> {
        let fds: Vec<_> = directory.iter().map(|it| it.as_raw_fd()).collect();
        daemon::ask_long(&self.daemon.socket()?, request, &fds)
    }

    fn print(&self, all: &[SuspendedInfo], line: impl Fn(&SuspendedInfo, String) -> String) -> Result<(), Failure> {
        if self.json {
            output::print_json(&all)?;
        } else {
            let named = |it: &SuspendedInfo| format!("process {} ({})", it.pid, output::plain(&it.command));
            let lines: Vec<_> = all.iter().map(|it| line(it, named(it)) + "\n").collect();
            output::print(&lines.concat())?;
        }
        Ok(())
    }
}

/// How long something took, and how fast bytes went by then.
fn time(it: &SuspendedInfo) -> String {
    let rate = output::rate(it.bytes, std::time::Duration::from_millis(it.ms));
    format!("{} ms, {rate}", it.ms)
}

/// Gives the GPU memory of processes back to the GPU.
pub(crate) fn suspend(options: &Suspend) -> Result<(), Failure> {
    let directory = match options.to.as_path() {
        to if to == Path::new("memory") => None,
        to => Some(File::open(to).with_context(|| format!("cannot open the directory {}", to.display()))?),
    };
    let request = Request::Suspend { pid: options.which.root()?, hold: options.hold, deep: options.deep };
    let Reply::Suspended(all) = options.which.ask(&request, directory.as_ref())? else {
        return Err(daemon::unexpected_answer().into());
    };
    if options.deep && !all.iter().all(|it| it.deep) {
        let why = "the daemon is of an older Rekindle: the processes are suspended, and keep their CUDA contexts";
        return Err(anyhow::anyhow!(why).into());
    }
    if all.is_empty() && !options.which.json {
        output::print("all processes of the tree are suspended already\n")?;
    }
    options
        .which
        .print(&all, |it, named| format!("suspended {named}: {} given back, {}", output::size(it.bytes), time(it)))
}

/// Loads the GPU memory of suspended processes again.
pub(crate) fn resume(options: &Resume) -> Result<(), Failure> {
    let request = Request::ResumeSuspended { pid: options.which.root()? };
    let Reply::WereResumed(all) = options.which.ask(&request, None)? else {
        return Err(daemon::unexpected_answer().into());
    };
    options.which.print(&all, |it, named| match it.bytes {
        0 => format!("{named} was not suspended"),
        bytes => format!("resumed {named}: {} loaded, {}", output::size(bytes), time(it)),
    })
}

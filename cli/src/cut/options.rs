//! The options of `rekindle cut`.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};

use crate::criu;
use crate::failure::Failure;
use crate::migrate::link::Via;
use crate::tls;

/// The host that is reached without a program.
const HERE: &str = "localhost";

/// The options of `rekindle cut`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    pub(super) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// Checkpoint process trees on several hosts at one moment; they keep running
    Make(Make),
    /// Restore all trees of a cut: all run, or none does
    Restore(Restore),
    /// Finish what a command has left that was lost: all trees of a restore run, or none; those that were to be killed are
    Settle(Settle),
    /// Show what a cut consists of
    Show {
        /// The cut's directory
        dir: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// The options of `rekindle cut make`.
#[derive(Debug, Args)]
pub(super) struct Make {
    /// The cut's directory, which has the manifest here, and each part on its host: DIR/HOST
    pub(super) dir: PathBuf,
    /// The root of a process tree, and the host that it is on: a name by which ssh reaches it without a question, `localhost`, or a name for
    /// what --via reaches
    #[arg(required = true, value_name = "HOST=PID", value_parser = tree)]
    pub(super) trees: Vec<(String, i32)>,
    /// Kill the trees as soon as the cut is good, and only then
    #[arg(long)]
    pub(super) stop: bool,
    #[command(flatten)]
    pub(super) kept: Kept,
    #[command(flatten)]
    pub(super) ways: Ways,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// The options of `rekindle cut restore`.
#[derive(Debug, Args)]
pub(super) struct Restore {
    /// The cut's directory
    pub(super) dir: PathBuf,
    #[command(flatten)]
    pub(super) ways: Ways,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// The options of `rekindle cut settle`.
#[derive(Debug, Args)]
pub(super) struct Settle {
    /// The cut's directory
    pub(super) dir: PathBuf,
    #[command(flatten)]
    pub(super) ways: Ways,
}

/// What CRIU keeps besides connections.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Kept {
    /// Keep file locks
    #[arg(long)]
    file_locks: bool,
    /// The largest file without a name that is kept, in MiB [default: CRIU's, 1]
    #[arg(long, value_name = "MIB")]
    ghost_limit: Option<u32>,
}

impl Kept {
    /// The options for `criu dump`.
    pub(super) fn options(self) -> Vec<String> {
        let locks = self.file_locks.then(|| "--file-locks".to_owned());
        let ghosts = self.ghost_limit.map(|mib| format!("--ghost-limit={mib}M"));
        ["--tcp-established".to_owned()].into_iter().chain(locks).chain(ghosts).collect()
    }
}

/// How other hosts are reached.
#[derive(Clone, Debug, Args)]
pub(super) struct Ways {
    /// The shell command that runs a program on the host that $REKINDLE_HOST names [default: ssh]
    #[arg(long, value_name = "COMMAND")]
    via: Option<String>,
    /// The rekindle program on other hosts
    #[arg(long, value_name = "PATH", default_value = "rekindle")]
    rekindle: String,
    #[command(flatten)]
    tls: tls::Way,
}

impl Ways {
    /// The way to a host.
    pub(super) fn to(&self, host: &str) -> Result<Via, Failure> {
        let words = |program: &str| [program, "cut-part"].map(str::to_owned);
        if let Some(words) = self.tls.words(host, tls::Service::Cut).filter(|_| host != HERE) {
            return Via::own(host, &words);
        }
        match &self.via {
            Some(command) => Ok(Via::command(host, command, &words(&self.rekindle))),
            None if host == HERE => {
                let own = std::env::current_exe().context("cannot find this program")?;
                Ok(Via::command(host, "env", &words(&own.to_string_lossy())))
            }
            None => Via::ssh(host, &words(&self.rekindle)),
        }
    }

    /// The options by which a command reaches the same hosts.
    fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        if let Some(via) = &self.via {
            words.extend(["--via".to_owned(), via.clone()]);
        }
        if self.rekindle != "rekindle" {
            words.extend(["--rekindle".to_owned(), self.rekindle.clone()]);
        }
        words.extend(self.tls.options());
        words
    }

    /// The command by which a user settles a cut, as a shell takes it.
    pub(super) fn settle_command(&self, dir: &Path) -> String {
        let words = ["rekindle", "cut", "settle", &dir.to_string_lossy()].map(str::to_owned);
        let words = words.into_iter().chain(self.words());
        words.map(|word| crate::migrate::quoted(&word)).collect::<Vec<_>>().join(" ")
    }
}

/// Whether a name of a host is one of a directory, too.
pub(super) fn is_host(host: &str) -> bool {
    let is_good = |c: char| c.is_ascii_alphanumeric() || "-_.@:".contains(c);
    !host.is_empty() && !host.starts_with(['-', '.']) && host.chars().all(is_good)
}

fn tree(text: &str) -> anyhow::Result<(String, i32)> {
    let (host, pid) = text.split_once('=').ok_or_else(|| anyhow!("give a host and a process: HOST=PID"))?;
    if !is_host(host) {
        return Err(anyhow!("{host:?} is no name of a host: letters, digits, and -_.@: within"));
    }
    let pid = pid.parse().ok().filter(|it| *it > 0).ok_or_else(|| anyhow!("{pid:?} is no number of a process"))?;
    Ok((host.to_owned(), pid))
}

/// The program of CRIU.
pub(super) fn criu() -> Result<PathBuf, Failure> {
    criu::program(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_a_host_and_a_process() {
        assert_eq!(tree("gpu1=812").unwrap(), ("gpu1".to_owned(), 812));
        assert_eq!(tree("root@10.0.0.1=1").unwrap(), ("root@10.0.0.1".to_owned(), 1));
        for bad in ["812", "gpu1=", "gpu1=0", "gpu1=-1", "=1", "a/b=1", "..=1", "-oProxyCommand=1", "gpu1=x"] {
            assert!(tree(bad).is_err(), "{bad}");
        }
    }
}

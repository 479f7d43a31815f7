//! The options of `rekindle migrate`.

use std::path::PathBuf;

use clap::Args;

use crate::{criu, daemon};

/// The directory of a migration's files, on both hosts: in memory.
pub(super) const DIRECTORY: &str = "/dev/shm/rekindle-migrations";

/// The options of `rekindle migrate`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The process; its descendants move with it
    pub(super) pid: Option<i32>,
    /// The host that it moves to, which ssh reaches without a question, or a name for what --via reaches
    #[arg(requires = "pid")]
    pub(super) host: Option<String>,
    /// Finish a migration whose connection was lost: tell HOST whether the processes go on there
    #[arg(long, num_args = 2, value_names = ["MIGRATION", "HOST"], conflicts_with = "pid")]
    pub(super) settle: Option<Vec<String>>,
    /// With --settle: the host that the processes come from is gone for good, and they go on at HOST
    #[arg(long, requires = "settle")]
    pub(super) take: bool,
    /// The shell command that runs a program on the other host [default: ssh HOST]
    #[arg(long, value_name = "COMMAND")]
    pub(super) via: Option<String>,
    /// The rekindle program on the other host
    #[arg(long, value_name = "PATH", default_value = "rekindle")]
    pub(super) rekindle: String,
    /// The connections over which content is sent at a time
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(super) streams: u32,
    /// Copy GPU memory while the processes run until a copy takes so many milliseconds, or no less than the one before
    #[arg(long, value_name = "MS", default_value_t = 100)]
    pub(super) pause_ms: u64,
    /// The directory for files on this host, best in memory
    #[arg(long, value_name = "DIR", default_value = DIRECTORY)]
    pub(super) dir: PathBuf,
    /// The directory for files on the other host, best in memory
    #[arg(long, value_name = "DIR", default_value = DIRECTORY)]
    pub(super) dir_there: String,
    #[command(flatten)]
    pub(super) kept: criu::Keep,
    /// Allow another version of the GPU driver there; see `rekindle restore`
    #[arg(long)]
    pub(super) allow_other_driver: bool,
    /// Allow GPUs of another kind there; see `rekindle restore`
    #[arg(long)]
    pub(super) allow_other_gpu: bool,
    /// The criu program [default: the one in PATH]
    #[arg(long, value_name = "PATH")]
    pub(super) criu: Option<PathBuf>,
    #[command(flatten)]
    pub(super) daemon: daemon::At,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
    /// Be the other host: what `rekindle migrate` runs there
    #[arg(long, hide = true, conflicts_with_all = ["pid", "settle"])]
    pub(super) receive: bool,
}

impl Options {
    /// The words that run `rekindle` on the other host.
    pub(super) fn words_there(&self) -> Vec<String> {
        [&self.rekindle, "migrate", "--receive", "--dir", &self.dir_there].map(ToString::to_string).to_vec()
    }
}

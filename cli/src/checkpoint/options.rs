//! The options of `rekindle checkpoint`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use rekindle_images::Protocol;

use super::of_containers::OfContainers;
use crate::{criu, daemon, images};

/// The options of `rekindle checkpoint`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The process; its descendants are checkpointed with it
    #[arg(required_unless_present = "containers")]
    pub(super) pid: Option<i32>,
    /// The directory for the image; created if necessary
    #[arg(required_unless_present = "containers")]
    pub(super) dir: Option<PathBuf>,
    /// Build on the image in this directory: write only what has changed since; the new image needs that one
    #[arg(long, value_name = "DIR")]
    pub(super) on: Option<PathBuf>,
    /// Then copy the image into this store, or under this name in it: URL/NAME. It stays in the directory too. Of one container,
    /// that is the archive that --export or --export-dir makes
    #[arg(long, value_name = "URL", conflicts_with_all = ["all", "pod", "create_image"])]
    pub(super) to: Option<String>,
    #[command(flatten)]
    pub(super) key: images::Key,
    /// Keep the processes running (the default)
    #[arg(long, short = 'R', conflicts_with_all = ["kill", "leave_stopped"])]
    pub(super) leave_running: bool,
    /// Leave the processes stopped
    #[arg(long, conflicts_with = "kill")]
    pub(super) leave_stopped: bool,
    /// Kill the processes when the image is complete
    #[arg(long)]
    pub(super) kill: bool,
    /// The protocol: auto, stop, clone, cow or recopy [default: the one that `rekindle protocol PID` shows]
    #[arg(long, value_name = "NAME")]
    pub(super) protocol: Option<Protocol>,
    /// Begin when the application calls `rekindle_checkpoint`
    #[arg(long)]
    pub(super) at_moment: bool,
    /// With --at-moment: how many seconds to wait for that call
    #[arg(long, value_name = "S", default_value_t = 60, requires = "at_moment")]
    pub(super) timeout: u64,
    #[command(flatten)]
    pub(super) kept: criu::Keep,
    /// The criu program [default: the one in PATH]
    #[arg(long, value_name = "PATH")]
    pub(super) criu: Option<PathBuf>,
    #[command(flatten)]
    pub(super) daemon: daemon::At,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
    /// More options for `criu dump`, `podman container checkpoint` or `docker checkpoint create`
    #[arg(last = true)]
    pub(super) more: Vec<OsString>,
    #[command(flatten)]
    pub(super) containers: OfContainers,
}

/// The state in which the processes are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Running,
    Stopped,
    Killed,
}

impl Options {
    /// The state in which the processes are left.
    pub(super) fn fate(&self) -> Fate {
        match (self.leave_stopped, self.kill) {
            (true, _) => Fate::Stopped,
            (_, true) => Fate::Killed,
            _ => Fate::Running,
        }
    }
}

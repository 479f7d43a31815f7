//! The options of `rekindle restore`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::of_containers::OfContainers;
use crate::{criu, daemon, images};

/// The options of `rekindle restore`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The image: a directory, or an archive of podman's; with --into, URL/NAME in a store. Several directories need -d
    #[arg(required_unless_present_any = ["import", "container", "pod"])]
    pub(super) images: Vec<PathBuf>,
    /// Copy the image from a store to this directory, which must not exist or be empty, and restore it from there
    #[arg(long, value_name = "DIR", conflicts_with_all = ["import", "container", "pod"])]
    pub(super) into: Option<PathBuf>,
    #[command(flatten)]
    pub(super) key: images::Key,
    /// Return when the processes run, without waiting for their end
    #[arg(short = 'd', long)]
    pub(super) restore_detached: bool,
    /// With -d: return when all GPU memory is loaded. Fails if it cannot be loaded
    #[arg(long, requires = "restore_detached")]
    pub(super) wait_loaded: bool,
    /// Let the processes run before CRIU has brought their own pages: it brings those that they touch at once, and the others
    /// meanwhile (`criu lazy-pages`). With --wait-loaded, wait for these too
    #[arg(long)]
    pub(super) lazy: bool,
    /// Read the whole image and compare every hash before starting anything
    #[arg(long)]
    pub(super) verify: bool,
    /// Allow another version of the GPU driver than at the dump. Addresses of functions that the program has stored in GPU
    /// memory may then be wrong without a warning
    #[arg(long)]
    pub(super) allow_other_driver: bool,
    /// Allow GPUs of another model, number of multiprocessors or memory size than at the dump
    #[arg(long)]
    pub(super) allow_other_gpu: bool,
    #[command(flatten)]
    pub(super) kept: criu::Keep,
    /// The criu program [default: the one in PATH]
    #[arg(long, value_name = "PATH")]
    pub(super) criu: Option<PathBuf>,
    #[command(flatten)]
    pub(super) daemon: daemon::At,
    /// Print JSON; for directories only with -d
    #[arg(long)]
    pub(super) json: bool,
    /// More options for `criu restore`, `podman container restore` or `docker start`
    #[arg(last = true)]
    pub(super) more: Vec<OsString>,
    #[command(flatten)]
    pub(super) containers: OfContainers,
}

impl Options {
    /// The options that are set and only for CRIU.
    pub(super) fn options_of_criu(&self) -> Vec<&'static str> {
        let flags = [
            ("--wait-loaded", self.wait_loaded),
            ("--lazy", self.lazy),
            ("--verify", self.verify),
            ("--allow-other-driver", self.allow_other_driver),
            ("--allow-other-gpu", self.allow_other_gpu),
            ("--criu", self.criu.is_some()),
        ];
        flags.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name).collect()
    }
}

//! The options of `rekindle restore` that are podman's own.

use std::path::PathBuf;

use clap::Args;

/// The containers, and options that only podman has. Their meaning is that of `podman container restore`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Containers of podman")]
pub(crate) struct OfPodman {
    /// Restore a container from this archive of podman's. May be repeated
    #[arg(long, short, value_name = "FILE")]
    pub(super) import: Vec<PathBuf>,
    /// Restore this container from the checkpoint that podman keeps. May be repeated
    #[arg(long, value_name = "NAME")]
    pub(super) container: Vec<String>,
    /// Restore the checkpointed containers of this pod; with archives, restore them into this pod
    #[arg(long, value_name = "NAME")]
    pub(super) pod: Option<String>,
    /// The name of the container that is restored from an archive [default: the name that it had]
    #[arg(long, short, value_name = "NAME")]
    pub(super) name: Option<String>,
    /// Publish a port of the container, as for `podman run`, instead of those that it had. May be repeated
    #[arg(long, short, value_name = "PORT")]
    pub(super) publish: Vec<String>,
    /// Take another IP address than the one that --ip of `podman run` gave
    #[arg(long)]
    pub(super) ignore_static_ip: bool,
    /// Take another MAC address than the one that --mac-address of `podman run` gave
    #[arg(long)]
    pub(super) ignore_static_mac: bool,
    /// Leave out the changes of the root file system that the archive has
    #[arg(long)]
    pub(super) ignore_rootfs: bool,
    /// Leave out the volumes that the archive has
    #[arg(long)]
    pub(super) ignore_volumes: bool,
    /// Keep the checkpoint, and CRIU's logs and statistics
    #[arg(long, short)]
    pub(super) keep: bool,
    /// Print podman's statistics too
    #[arg(long)]
    pub(super) print_stats: bool,
    /// The podman program [default: the one in PATH]
    #[arg(long, value_name = "PATH")]
    pub(super) podman: Option<PathBuf>,
    /// Refused
    #[arg(long, value_name = "FILE", hide = true)]
    pub(super) import_previous: Option<PathBuf>,
}

impl OfPodman {
    /// Whether an option is set that CRIU does not have.
    pub(super) fn is_used(&self) -> bool {
        let lists = [self.import.is_empty(), self.container.is_empty(), self.publish.is_empty()];
        let named = [self.pod.is_some(), self.name.is_some(), self.podman.is_some(), self.import_previous.is_some()];
        let flags = [self.ignore_static_ip, self.ignore_static_mac, self.ignore_rootfs, self.ignore_volumes];
        lists.contains(&false) || named.contains(&true) || flags.contains(&true) || self.keep || self.print_stats
    }
}

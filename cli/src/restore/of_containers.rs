//! The options of `rekindle restore` for containers; most are podman's own.

use std::path::PathBuf;

use anyhow::anyhow;
use clap::Args;

use crate::engine::{self, Engine, Kind};
use crate::failure::Failure;

/// The containers, and options that only podman has. Their meaning is that of `podman container restore`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Containers")]
pub(crate) struct OfContainers {
    /// The engine of the containers: podman, docker or nerdctl. Docker and nerdctl restore stopped containers from checkpoints
    /// that they keep: of the options below, they know --container and --checkpoint only
    #[arg(long, value_name = "NAME", default_value = "podman", hide_possible_values = true)]
    pub(super) engine: Kind,
    /// With --engine docker or nerdctl: the name of the checkpoint
    #[arg(long, value_name = "NAME", requires = "container")]
    pub(super) checkpoint: Option<String>,
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

impl OfContainers {
    /// The engine of the containers.
    pub(super) fn engine(&self) -> Engine {
        Engine::new(self.engine, self.podman.as_deref())
    }

    /// The options that are set and that only podman has.
    fn options_of_podman(&self) -> Vec<&'static str> {
        let options = [
            ("--import", !self.import.is_empty()),
            ("--pod", self.pod.is_some()),
            ("--name", self.name.is_some()),
            ("--publish", !self.publish.is_empty()),
            ("--ignore-static-ip", self.ignore_static_ip),
            ("--ignore-static-mac", self.ignore_static_mac),
            ("--ignore-rootfs", self.ignore_rootfs),
            ("--ignore-volumes", self.ignore_volumes),
            ("--keep", self.keep),
            ("--print-stats", self.print_stats),
            ("--podman", self.podman.is_some()),
            ("--import-previous", self.import_previous.is_some()),
        ];
        options.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name).collect()
    }

    /// Whether an option is set that CRIU does not have.
    pub(super) fn is_used(&self) -> bool {
        self.engine.names_checkpoints() || !self.container.is_empty() || !self.options_of_podman().is_empty()
    }

    /// Refuses options that the engine does not have. `of_criu` are those for CRIU that podman passes on.
    pub(super) fn check_engine(
        &self,
        has_archives: bool,
        mut of_criu: impl Iterator<Item = &'static str>,
    ) -> Result<(), Failure> {
        let engine = self.engine;
        let of_podman = self.options_of_podman();
        if !engine.needs_name(self.checkpoint.as_deref(), of_podman.first().copied(), of_criu.next())? {
            return Ok(());
        }
        if has_archives {
            return Err(Failure::usage(anyhow!(
                "{engine} restores from no archives: give --container and --checkpoint"
            )));
        }
        match self.checkpoint.as_deref() {
            Some(name) if !self.container.is_empty() => engine::check_name(name),
            _ => Err(Failure::usage(anyhow!(
                "{engine} keeps checkpoints under names: give --container and --checkpoint"
            ))),
        }
    }
}

//! The options of `rekindle checkpoint` for containers; most are podman's own.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::{Args, ValueEnum};

use crate::engine::{Engine, Kind};
use crate::failure::Failure;

/// The containers, and options that only podman has. Their meaning is that of `podman container checkpoint`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Containers")]
pub(crate) struct OfContainers {
    /// The engine of the containers: podman, docker or nerdctl. Docker and nerdctl keep checkpoints themselves: of the options
    /// below, they know --checkpoint only, and no pods
    #[arg(long, value_name = "NAME", requires = "containers", default_value = "podman", hide_possible_values = true)]
    pub(super) engine: Kind,
    /// With --engine docker or nerdctl: the name of the checkpoint
    #[arg(long, value_name = "NAME", requires = "containers")]
    pub(super) checkpoint: Option<String>,
    /// Checkpoint this container instead of a process. May be repeated: the containers are checkpointed one after the other, and
    /// if one fails, the others are checkpointed all the same
    #[arg(long, value_name = "NAME", group = "containers", conflicts_with_all = ["pid", "on", "leave_stopped", "criu"])]
    pub(super) container: Vec<String>,
    /// Checkpoint all containers that run and have a process that uses a GPU through Rekindle, one after the other
    #[arg(long, group = "containers", conflicts_with_all = ["pid", "container", "on", "leave_stopped", "criu"])]
    pub(super) all: bool,
    /// Checkpoint all running containers of this pod at one moment: none goes on before all stand still. If one fails, there is no
    /// checkpoint
    #[arg(long, value_name = "NAME", group = "containers",
          conflicts_with_all = ["pid", "container", "all", "on", "leave_stopped", "criu", "at_moment"])]
    pub(super) pod: Option<String>,
    /// Write the container's checkpoint to this file [default: podman keeps it]
    #[arg(long, short, value_name = "FILE", requires = "containers", conflicts_with_all = ["pid", "all", "pod"])]
    pub(super) export: Option<PathBuf>,
    /// Write each container's checkpoint to a file in this directory that is named after the container, NAME.tar.zst for example
    #[arg(long, value_name = "DIR", requires = "containers", conflicts_with_all = ["pid", "export"])]
    pub(super) export_dir: Option<PathBuf>,
    /// Compress exported checkpoints: zstd, gzip or none [default: zstd]
    #[arg(long, short, value_name = "NAME", requires = "containers", hide_possible_values = true)]
    pub(super) compress: Option<Compress>,
    /// Write the checkpoint to a container image of this name
    #[arg(long, value_name = "NAME", requires = "containers", conflicts_with_all = ["all", "pod", "export", "export_dir"])]
    pub(super) create_image: Option<String>,
    /// Keep CRIU's logs and statistics
    #[arg(long, short, requires = "containers")]
    pub(super) keep: bool,
    /// Leave changes of the root file system out of an exported checkpoint
    #[arg(long, requires = "containers")]
    pub(super) ignore_rootfs: bool,
    /// Leave volumes out of an exported checkpoint
    #[arg(long, requires = "containers")]
    pub(super) ignore_volumes: bool,
    /// Print podman's statistics too
    #[arg(long, requires = "containers")]
    pub(super) print_stats: bool,
    /// The podman program [default: the one in PATH]
    #[arg(long, value_name = "PATH", requires = "containers")]
    pub(super) podman: Option<PathBuf>,
    /// Refused
    #[arg(long, short = 'P', hide = true)]
    pre_checkpoint: bool,
    /// Refused
    #[arg(long, hide = true)]
    with_previous: bool,
}

/// How podman compresses an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Compress {
    Zstd,
    Gzip,
    None,
}

impl fmt::Display for Compress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Zstd => "zstd",
            Self::Gzip => "gzip",
            Self::None => "none",
        })
    }
}

impl Compress {
    fn ending(self) -> &'static str {
        match self {
            Self::Zstd => "tar.zst",
            Self::Gzip => "tar.gz",
            Self::None => "tar",
        }
    }
}

impl OfContainers {
    /// Whether containers are to be checkpointed, and not a process.
    pub(super) fn are_meant(&self) -> bool {
        self.all || self.pod.is_some() || !self.container.is_empty()
    }

    /// Whether the options name one container, so that the report is about one.
    pub(super) fn single(&self) -> Option<&str> {
        match self.container.as_slice() {
            [name] => Some(name),
            _ => None,
        }
    }

    /// The engine of the containers.
    pub(super) fn engine(&self) -> Engine {
        Engine::new(self.engine, self.podman.as_deref())
    }

    /// The options that are set and that only podman has.
    fn options_of_podman(&self) -> Vec<&'static str> {
        let options = [
            ("--pod", self.pod.is_some()),
            ("--export", self.export.is_some()),
            ("--export-dir", self.export_dir.is_some()),
            ("--compress", self.compress.is_some()),
            ("--create-image", self.create_image.is_some()),
            ("--podman", self.podman.is_some()),
        ];
        let flags = options.iter().filter(|(_, is_set)| *is_set).map(|(name, _)| *name);
        flags.chain(self.flags()).collect()
    }

    /// podman's flags that are set.
    fn flags(&self) -> impl Iterator<Item = &'static str> {
        let flags = [
            ("--keep", self.keep),
            ("--ignore-rootfs", self.ignore_rootfs),
            ("--ignore-volumes", self.ignore_volumes),
            ("--print-stats", self.print_stats),
        ];
        flags.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name)
    }

    /// Refuses options that the engine does not have. `of_criu` are those for CRIU that podman passes on.
    fn check_engine(&self, of_criu: impl Iterator<Item = OsString>) -> Result<(), Failure> {
        let engine = self.engine;
        let of_criu = of_criu.into_iter().next();
        let of_criu = of_criu.as_ref().map(|option| option.to_string_lossy());
        let of_podman = self.options_of_podman();
        if !engine.needs_name(self.checkpoint.as_deref(), of_podman.first().copied(), of_criu.as_deref())? {
            return Ok(());
        }
        match self.checkpoint.as_deref() {
            None => Err(Failure::usage(anyhow!("{engine} keeps checkpoints under names: give --checkpoint NAME"))),
            Some(name) => crate::engine::check_name(name),
        }
    }

    /// Refuses options that cannot be meant. `to_store`: whether what is made is to be copied into a store.
    pub(super) fn check(&self, of_criu: impl Iterator<Item = OsString>, to_store: bool) -> Result<(), Failure> {
        if self.are_meant() {
            self.check_engine(of_criu)?;
        }
        if to_store && self.are_meant() {
            let makes_one = self.single().is_some_and(|it| self.file(it).is_some());
            if !makes_one || self.compress == Some(Compress::Gzip) {
                let why = "--to is for the archive of one container: give one --container, --export FILE, and no --compress gzip";
                return Err(Failure::usage(anyhow!(why)));
            }
        }
        if self.pre_checkpoint || self.with_previous {
            let why = "Rekindle copies GPU memory while the container runs, and podman's earlier checkpoints of memory have none of \
                       it: leave out --pre-checkpoint and --with-previous";
            return Err(Failure::refused(anyhow!(why)));
        }
        if self.container.len() > 1 && (self.export.is_some() || self.create_image.is_some()) {
            let why = "each of several containers needs a file of its own: give --export-dir instead of --export or --create-image";
            return Err(Failure::usage(anyhow!(why)));
        }
        let mut names = self.container.clone();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|it| it[0] == it[1]) {
            return Err(Failure::usage(anyhow!("container {} is named twice", twice[0])));
        }
        Ok(())
    }

    /// The file of a container's checkpoint; none if podman keeps it.
    pub(super) fn file(&self, name: &str) -> Option<PathBuf> {
        let ending = self.compress.unwrap_or(Compress::Zstd).ending();
        let in_dir = |dir: &Path| dir.join(format!("{name}.{ending}"));
        self.export.clone().or_else(|| self.export_dir.as_deref().map(in_dir))
    }

    /// Options for podman.
    pub(super) fn arguments(&self) -> Vec<OsString> {
        let mut all: Vec<OsString> = self.flags().map(Into::into).collect();
        if let Some(compress) = self.compress {
            all.extend(["--compress".into(), compress.to_string().into()]);
        }
        if let Some(image) = &self.create_image {
            all.extend(["--create-image".into(), image.into()]);
        }
        all
    }
}

//! The OCI hook that adds the interposer to a container, and has the daemon grant it GPUs.
//!
//! ```text
//!   podman, an annotated container ── precreate ──┐    config.json changed: mounts, environment, hooks
//!                                                 ├──► createRuntime: the image checked, GPUs given ──► ... ──► poststop
//!   any engine, --device rekindle.dev/gpu=0 ─ CDI ┤    the engine adds the same
//!   containerd, rekindle-runc as its runtime ─────┘    (runtime.rs)
//! ```
//!
//! podman runs it at its stage `precreate`: the hook reads the container's config.json from stdin, and podman uses the output
//! instead. So the additions are part of the specification, as CRIU needs it: CRIU cannot dump mounts that a later stage adds
//! without the specification. The output for a container whose annotations ask for no GPU equals the input, byte for byte.
//!
//! The hook treats config.json as plain JSON and uses no types of a library: such types (of oci-spec, for example) know the
//! fields of one version of the specification, and would drop all others.

mod annotations;
mod cdi;
mod daemon;
mod host;
mod image;
mod install;
mod lxc;
mod precreate;
mod report;
mod runtime;
mod spec;
mod stage;

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use serde_json::{Value, json};
use thiserror::Error;

use self::host::HostArgs;

/// OCI hook of Rekindle: give a container the interposer and its GPUs.
///
/// Without a command this is podman's `precreate` hook. `install` sets up podman, CRIU and engines that support CDI.
#[derive(Debug, Parser)]
#[command(name = "rekindle-oci-hook", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    host: HostArgs,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Read a container's config.json from stdin and write the changed one to stdout (the default)
    Precreate,
    /// OCI stage createRuntime: read a container's state from stdin, check its image, give it GPUs
    CreateRuntime {
        /// A GPU to give, by number or UUID, or all; may be repeated [default: as its annotations ask]
        #[arg(long, value_name = "GPU")]
        gpu: Vec<String>,
    },
    /// OCI stage poststop: read the state of a stopped container from stdin, and tell the daemon
    Poststop,
    /// The specification for engines that support CDI
    #[command(subcommand)]
    Cdi(Cdi),
    /// The configuration of containers of LXC and Incus
    #[command(subcommand)]
    Lxc(Lxc),
    /// Print the file for /etc/containers/oci/hooks.d that makes podman run this program
    HooksJson {
        /// The path at which this program will be installed [default: its present path]
        #[arg(long, value_name = "PATH")]
        path: Option<PathBuf>,
    },
    /// Let podman find this hook, and CRIU the plugin
    Install(PlaceArgs),
    /// Remove what install has created
    Uninstall(PlaceArgs),
}

#[derive(Debug, Subcommand)]
enum Cdi {
    /// Write the specification for the daemon's GPUs, for podman run --device rekindle.dev/gpu=0
    Generate {
        /// The file to write [default: stdout]
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
        /// The path at which this program will be installed [default: its present path]
        #[arg(long, value_name = "PATH")]
        path: Option<PathBuf>,
    },
}

#[derive(Debug, Subcommand)]
enum Lxc {
    /// Print the lines that give a container GPUs: for its file config (LXC), or for raw.lxc (Incus)
    Config {
        /// A GPU to give, by number or UUID, or all; may be repeated
        #[arg(long, value_name = "GPU", default_value = "all")]
        gpu: Vec<String>,
    },
    /// LXC's hook start-host: give the container GPUs
    StartHost {
        /// A GPU to give, by number or UUID, or all; may be repeated
        #[arg(long, value_name = "GPU", default_value = "all")]
        gpu: Vec<String>,
        /// What LXC says by itself, as in its environment
        #[arg(hide = true)]
        from_lxc: Vec<String>,
    },
}

#[derive(Debug, Args)]
struct PlaceArgs {
    /// Only this part [default: both]
    #[arg(long, value_name = "PART")]
    only: Option<Part>,
    /// The directory where engines look for CDI specifications
    #[arg(long, value_name = "DIR", default_value = "/etc/cdi")]
    cdi_dir: PathBuf,
    /// podman's hooks directory
    #[arg(long, value_name = "DIR", default_value = "/etc/containers/oci/hooks.d")]
    hooks_dir: PathBuf,
    /// CRIU's configuration file, which CRIU also reads under runc and crun
    #[arg(long, value_name = "FILE", default_value = "/etc/criu/default.conf")]
    criu_conf: PathBuf,
    /// The directory of CRIU's own plugins
    #[arg(long, value_name = "DIR", default_value = "/usr/lib/criu")]
    criu_plugins: PathBuf,
    /// The directory of Rekindle's CRIU plugin [default: criu in --lib-dir]
    #[arg(long, value_name = "DIR")]
    plugin_dir: Option<PathBuf>,
}

/// What is installed or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The hook and the devices of container engines
    Engines,
    /// The plugin of CRIU
    Criu,
}

impl PlaceArgs {
    fn has(&self, part: Part) -> bool {
        self.only.is_none_or(|only| only == part)
    }
}

/// An error of the hook.
#[derive(Debug, Error)]
enum Error {
    #[error("cannot read stdin: {0}")]
    Read(io::Error),
    #[error(transparent)]
    Precreate(#[from] precreate::PrecreateError),
    #[error(transparent)]
    Stage(#[from] stage::StageError),
    #[error(transparent)]
    Lxc(#[from] lxc::LxcError),
    #[error(transparent)]
    Daemon(#[from] daemon::DaemonError),
    #[error(transparent)]
    Spec(#[from] spec::SpecError),
    #[error(transparent)]
    Host(#[from] host::HostError),
    #[error(transparent)]
    Install(#[from] install::InstallError),
    #[error("cannot write to stdout: {0}")]
    Write(io::Error),
}

/// The command line, of which the manual is made.
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
}

/// The program.
#[must_use]
pub fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    if let Some(name) = arguments.next().as_deref().and_then(runtime::called_as) {
        return runtime::become_runtime(name, &arguments.collect::<Vec<_>>());
    }
    let cli = Cli::parse();
    let done = match cli.command {
        None | Some(Command::Precreate) => precreate(&cli.host),
        Some(Command::CreateRuntime { gpu }) => create_runtime(&cli.host, &gpu),
        Some(Command::Poststop) => poststop(&cli.host),
        Some(Command::Cdi(Cdi::Generate { output, path })) => generate_cdi(&cli.host, output, path),
        Some(Command::Lxc(Lxc::Config { gpu })) => lxc_config(&cli.host, &gpu),
        Some(Command::Lxc(Lxc::StartHost { gpu, .. })) => lxc::start_host(gpu, &cli.host.socket).map_err(Error::from),
        Some(Command::HooksJson { path }) => hooks_json(&cli.host, path),
        Some(Command::Install(args)) => install(&cli.host, args),
        Some(Command::Uninstall(args)) => uninstall(&cli.host, args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::error(&format!("rekindle-oci-hook: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn precreate(args: &HostArgs) -> Result<(), Error> {
    let config = stdin()?;
    // podman has mounted the root, and config.json has its absolute path.
    let changed = precreate::change(&config, Path::new("/"), args)?;
    io::stdout().write_all(changed.as_deref().unwrap_or(&config)).map_err(Error::Write)
}

fn create_runtime(args: &HostArgs, gpus: &[String]) -> Result<(), Error> {
    let lib_dir = host::lib_dir(args.lib_dir.as_deref())?;
    Ok(stage::create_runtime(&stdin()?, gpus, &lib_dir, &args.socket)?)
}

fn poststop(args: &HostArgs) -> Result<(), Error> {
    Ok(stage::poststop(&stdin()?, &args.socket)?)
}

fn generate_cdi(args: &HostArgs, output: Option<PathBuf>, path: Option<PathBuf>) -> Result<(), Error> {
    let text = cdi(args, path)?;
    match output {
        Some(file) => Ok(install::write(&file, &text)?),
        None => io::stdout().write_all(text.as_bytes()).map_err(Error::Write),
    }
}

fn lxc_config(args: &HostArgs, gpus: &[String]) -> Result<(), Error> {
    let provided = host::find(args.lib_dir.as_deref(), &args.socket)?;
    let text = lxc::config(&provided, &spec::Hooks::new(args, None)?, gpus);
    io::stdout().write_all(text.as_bytes()).map_err(Error::Write)
}

/// The CDI specification.
fn cdi(args: &HostArgs, path: Option<PathBuf>) -> Result<String, Error> {
    let provided = host::find(args.lib_dir.as_deref(), &args.socket)?;
    let gpus = daemon::gpus(&args.socket)?;
    Ok(format!("{:#}\n", cdi::generate(&provided, &spec::Hooks::new(args, path)?, &gpus)?))
}

fn stdin() -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    io::stdin().read_to_end(&mut bytes).map_err(Error::Read)?;
    Ok(bytes)
}

fn hooks_json(args: &HostArgs, path: Option<PathBuf>) -> Result<(), Error> {
    writeln!(io::stdout(), "{:#}", hook(args, path)?).map_err(Error::Write)
}

fn install(host: &HostArgs, args: PlaceArgs) -> Result<(), Error> {
    let (engines, criu) = (args.has(Part::Engines), args.has(Part::Criu));
    let places = places(host, args)?;
    if engines {
        let hook = format!("{:#}\n", hook(host, None)?);
        let cdi = cdi(host, None).map_err(|error| error.to_string());
        print_lines(install::for_engines(&places, &hook, cdi)?)?;
    }
    if criu { print_lines(install::for_criu(&places)?) } else { Ok(()) }
}

fn uninstall(host: &HostArgs, args: PlaceArgs) -> Result<(), Error> {
    let (engines, criu) = (args.has(Part::Engines), args.has(Part::Criu));
    let places = places(host, args)?;
    if engines {
        print_lines(install::remove_for_engines(&places)?)?;
    }
    if criu { print_lines(install::remove_for_criu(&places)?) } else { Ok(()) }
}

fn print_lines(lines: Vec<String>) -> Result<(), Error> {
    lines.iter().try_for_each(|line| writeln!(io::stdout(), "{line}")).map_err(Error::Write)
}

fn places(host: &HostArgs, args: PlaceArgs) -> Result<install::Places, Error> {
    let plugin_dir = match args.plugin_dir {
        Some(dir) => dir,
        None => host::lib_dir(host.lib_dir.as_deref())?.join("criu"),
    };
    let PlaceArgs { hooks_dir, cdi_dir, criu_conf, criu_plugins, .. } = args;
    Ok(install::Places { hooks_dir, cdi_dir, criu_conf, criu_plugins, plugin_dir })
}

/// The file for hooks.d.
fn hook(args: &HostArgs, path: Option<PathBuf>) -> Result<Value, Error> {
    let spec::Hooks { path, host } = spec::Hooks::new(args, path)?;
    let arguments = ["rekindle-oci-hook", "precreate"].map(str::to_owned).into_iter().chain(host);
    Ok(json!({
        "version": "1.0.0",
        "hook": { "path": path, "args": arguments.collect::<Vec<_>>() },
        // For every value: the hook refuses a wrong one, instead of ignoring it.
        "when": { "annotations": { "^dev\\.rekindle/(enable|gpus)$": ".*" } },
        "stages": ["precreate"],
    }))
}

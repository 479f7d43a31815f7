//! The OCI hook that gives a container the interposer.
//!
//! podman runs it at its stage `precreate`: the container's config.json comes in on stdin, and what goes out on stdout
//! takes its place. So what is added is part of the specification, as CRIU needs it to be: mounts that a later stage
//! brings in behind the specification's back cannot be dumped. A container without the annotation
//! `dev.rekindle/enable=true` comes out byte for byte as it went in.

mod host;
mod image;
mod install;
mod report;
mod spec;

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use serde_json::{Value, json};
use thiserror::Error;

use self::image::Image;

/// podman's `precreate` hook: reads a container's config.json, writes the one it is to have.
/// `install` has podman and CRIU find what they need.
#[derive(Debug, Parser)]
#[command(name = "rekindle-oci-hook", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    host: HostArgs,
}

#[derive(Debug, Args)]
struct HostArgs {
    /// Where the interposer is [default: ../lib/rekindle beside this program]
    #[arg(long, global = true, value_name = "DIR")]
    lib_dir: Option<PathBuf>,
    /// The daemon's socket
    #[arg(long, global = true, env = "REKINDLE_SOCKET", value_name = "PATH", default_value = host::DEFAULT_SOCKET)]
    socket: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Read config.json from stdin and write the changed one to stdout; what is done without a command too
    Precreate,
    /// Print the file for /etc/containers/oci/hooks.d that has podman run this program
    HooksJson {
        /// Where this program will be [default: where it is]
        #[arg(long, value_name = "PATH")]
        path: Option<PathBuf>,
    },
    /// Have podman find this hook, and CRIU the plugin
    Install(PlaceArgs),
    /// Take away what install has made
    Uninstall(PlaceArgs),
}

#[derive(Debug, Args)]
struct PlaceArgs {
    /// podman's folder of hooks
    #[arg(long, value_name = "DIR", default_value = "/etc/containers/oci/hooks.d")]
    hooks_dir: PathBuf,
    /// CRIU's configuration, which runc's and crun's CRIU reads too
    #[arg(long, value_name = "FILE", default_value = "/etc/criu/default.conf")]
    criu_conf: PathBuf,
    /// Where CRIU's own plugins are
    #[arg(long, value_name = "DIR", default_value = "/usr/lib/criu")]
    criu_plugins: PathBuf,
    /// Where our CRIU plugin is [default: criu in the folder of --lib-dir]
    #[arg(long, value_name = "DIR")]
    plugin_dir: Option<PathBuf>,
}

/// Why a container cannot be given the interposer.
#[derive(Debug, Error)]
enum Error {
    #[error("cannot read config.json from stdin: {0}")]
    Read(io::Error),
    #[error("stdin is no JSON: {0}")]
    Json(serde_json::Error),
    #[error(transparent)]
    Spec(#[from] spec::SpecError),
    #[error(transparent)]
    Host(#[from] host::HostError),
    #[error(transparent)]
    Install(#[from] install::InstallError),
    #[error("cannot write to stdout: {0}")]
    Write(io::Error),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.command {
        None | Some(Command::Precreate) => precreate(&cli.host),
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
    let mut config = Vec::new();
    io::stdin().read_to_end(&mut config).map_err(Error::Read)?;
    let mut spec = serde_json::from_slice(&config).map_err(Error::Json)?;
    if spec::wanted(&spec)? {
        let provided = host::find(args.lib_dir.as_deref(), &args.socket)?;
        // podman has mounted it, and names it by an absolute path.
        let root = spec::root(&spec, Path::new("/"));
        let image = root.as_deref().map(Image::open).transpose().map_err(spec::SpecError::from)?;
        spec::add(&mut spec, &provided, image.as_ref())?;
        config = spec.to_string().into_bytes();
    }
    io::stdout().write_all(&config).map_err(Error::Write)
}

fn hooks_json(args: &HostArgs, path: Option<PathBuf>) -> Result<(), Error> {
    writeln!(io::stdout(), "{:#}", hook(args, path)?).map_err(Error::Write)
}

fn install(host: &HostArgs, args: PlaceArgs) -> Result<(), Error> {
    let hook = format!("{:#}\n", hook(host, None)?);
    say(install::install(&places(host, args)?, &hook)?)
}

fn uninstall(host: &HostArgs, args: PlaceArgs) -> Result<(), Error> {
    say(install::uninstall(&places(host, args)?)?)
}

fn say(done: Vec<String>) -> Result<(), Error> {
    done.iter().try_for_each(|line| writeln!(io::stdout(), "{line}")).map_err(Error::Write)
}

fn places(host: &HostArgs, args: PlaceArgs) -> Result<install::Places, Error> {
    let plugin_dir = match args.plugin_dir {
        Some(dir) => dir,
        None => host::lib_dir(host.lib_dir.as_deref())?.join("criu"),
    };
    let PlaceArgs { hooks_dir, criu_conf, criu_plugins, .. } = args;
    Ok(install::Places { hooks_dir, criu_conf, criu_plugins, plugin_dir })
}

/// The file for hooks.d.
fn hook(args: &HostArgs, path: Option<PathBuf>) -> Result<Value, Error> {
    let path = match path {
        Some(path) => path,
        None => host::this_program()?,
    };
    let mut arguments: Vec<OsString> = vec!["rekindle-oci-hook".into(), "precreate".into()];
    if let Some(lib_dir) = &args.lib_dir {
        arguments.extend(["--lib-dir".into(), lib_dir.into()]);
    }
    if args.socket.as_os_str() != host::DEFAULT_SOCKET {
        arguments.extend(["--socket".into(), args.socket.as_os_str().into()]);
    }
    let arguments: Vec<_> = arguments.iter().map(|argument| argument.to_string_lossy()).collect();
    Ok(json!({
        "version": "1.0.0",
        "hook": { "path": path.to_string_lossy(), "args": arguments },
        // Whatever the value: one that means nothing is then refused, not ignored.
        "when": { "annotations": { "^dev\\.rekindle/enable$": ".*" } },
        "stages": ["precreate"],
    }))
}

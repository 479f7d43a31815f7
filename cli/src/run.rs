//! `rekindle run`: becomes a program that finds Rekindle's `libcuda.so.1` before the driver's.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use rekindle_images::Protocol;
use rekindle_wire::attach::PROTOCOL;

use crate::daemon;
use crate::failure::Failure;

/// The name by which programs look for the driver.
pub(crate) const LIBRARY: &str = "libcuda.so.1";
/// The directory of the library, relative to the directory of this program.
const INSTALLED: &str = "../lib/rekindle";

/// The options of `rekindle run`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    daemon: daemon::At,
    /// Rekindle's libcuda.so.1, or its directory [default: ../lib/rekindle, relative to this program]
    #[arg(long, value_name = "PATH")]
    lib: Option<PathBuf>,
    /// The protocol for its checkpoints: auto, stop, clone, cow or recopy [default: the daemon's setting]
    #[arg(long, value_name = "NAME")]
    protocol: Option<Protocol>,
    /// Checkpoint it again and again, restore it when it fails, and wait for its end: as `rekindle protect --command`, which has
    /// more options
    #[arg(long)]
    protect: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

impl Options {
    /// Whether the program is to be protected.
    pub(crate) fn is_protected(&self) -> bool {
        self.protect
    }

    /// The same as arguments of `rekindle protect`.
    pub(crate) fn as_protection(&self) -> Result<Vec<OsString>, Failure> {
        let mut line: Vec<OsString> = vec!["--command".into(), "--socket".into(), self.daemon.socket()?.into()];
        line.extend(self.lib.iter().flat_map(|it| ["--lib".into(), it.into()]));
        line.extend(self.protocol.iter().flat_map(|it| ["--protocol".into(), it.as_str().into()]));
        line.push("--".into());
        line.extend(self.command.iter().cloned());
        Ok(line)
    }

    /// The command of a protection, as arguments of `rekindle run`.
    pub(crate) fn of_protection(socket: &Path, command: &[String]) -> Result<Self, Failure> {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            options: Options,
        }
        let socket = ["run".as_ref(), "--socket".as_ref(), socket.as_os_str()];
        let line = socket.into_iter().chain(command.iter().map(OsStr::new));
        let line: Line = clap::Parser::try_parse_from(line).map_err(|error| Failure::usage(anyhow!("{error}")))?;
        Ok(line.options)
    }
}

/// Runs the program in this process. Returns only on an error.
pub(crate) fn run(options: Options) -> Result<(), Failure> {
    let socket = options.daemon.socket()?;
    let lib = match options.lib {
        Some(path) => path,
        None => beside_program()?,
    };
    let lib = library_directory(&lib)?;
    let [program, arguments @ ..] = options.command.as_slice() else {
        return Err(anyhow!("no program is given").into());
    };
    let mut command = Command::new(program);
    if let Some(protocol) = options.protocol {
        command.env(PROTOCOL, protocol.as_str());
    } else if let Some(name) = std::env::var_os(PROTOCOL)
        && let Err(error) = name.to_string_lossy().parse::<Protocol>()
    {
        eprintln!("rekindle: {PROTOCOL}: {error}; what the daemon is configured with counts");
    }
    let error = command
        .args(arguments)
        .env("LD_LIBRARY_PATH", prepended(lib.as_os_str(), std::env::var_os("LD_LIBRARY_PATH")))
        .env("REKINDLE_SOCKET", socket)
        .exec();
    Err(anyhow!(error).context(format!("cannot run {}", program.display())).into())
}

/// The folder of Rekindle's libraries, as it is installed with this program.
pub(crate) fn beside_program() -> anyhow::Result<PathBuf> {
    // Links are resolved: /usr/local/bin/rekindle may lead into the built tree.
    let program = std::env::current_exe().and_then(|it| it.canonicalize());
    let program = program.context("cannot tell where this program is; use --lib")?;
    let directory = program.parent().unwrap_or(Path::new("/"));
    Ok(directory.join(INSTALLED))
}

/// The directory for the loader, which finds the library there by its name.
fn library_directory(path: &Path) -> anyhow::Result<PathBuf> {
    let file = if path.is_dir() { path.join(LIBRARY) } else { path.to_owned() };
    if !file.is_file() {
        bail!(
            "there is no {}: install all of Rekindle, or give the directory of its {LIBRARY} with --lib",
            file.display()
        );
    }
    if file.file_name() != Some(OsStr::new(LIBRARY)) {
        bail!("{} is not named {LIBRARY}, by which programs look for it", file.display());
    }
    let directory = file.parent().unwrap_or(Path::new("."));
    let resolved = |path: &Path| path.canonicalize().with_context(|| format!("cannot resolve {}", path.display()));
    let library = resolved(&file)?;
    let directory = match library.parent() {
        // The directory of the build: all processes of the program load the same one, also after an upgrade.
        Some(build) if library.file_name() == Some(OsStr::new(LIBRARY)) => build.to_owned(),
        // A link by the right name that leads to a file with another.
        _ => resolved(directory)?,
    };
    if directory.as_os_str().as_encoded_bytes().contains(&b':') {
        bail!("{} has a colon in it, which LD_LIBRARY_PATH cannot express", directory.display());
    }
    Ok(directory)
}

/// The value with the directory in front. An empty entry would be the current directory, so there is none.
fn prepended(directory: &OsStr, rest: Option<OsString>) -> OsString {
    let mut path = directory.to_owned();
    if let Some(rest) = rest.filter(|it| !it.is_empty()) {
        path.push(":");
        path.push(rest);
    }
    path
}

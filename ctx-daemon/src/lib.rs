//! `rekindled`, the context daemon, and its workers.
//!
//! ```text
//!   rekindled [serve]                 the daemon: control socket, clients, pool of workers    daemon
//!   rekindled check-config [FILE]     what is wrong with a configuration file                 config
//!   rekindled worker --channel-fd N   one worker, started by the daemon                       worker
//!   rekindled nvml --channel-fd N     what asks the machine's NVML, started by the daemon     nvml
//!   rekindled native --channel-fd N   what calls the driver's checkpoint, started by it       native
//! ```
//!
//! They are one program, so that a daemon and what it starts are always of one version.

mod config;
mod daemon;
mod limit;
mod log;
mod native;
mod nvml;

use std::io::Write;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use rekindle_ctx_worker as worker;
use rekindle_ctx_worker::confinement::Confinement;
use tracing::error;

use crate::config::{Config, Host, Report, ServeOptions};

/// The Rekindle daemon: owns the GPU contexts of applications, so that they can be checkpointed.
#[derive(Debug, Parser)]
#[command(name = "rekindled", version, args_conflicts_with_subcommands = true)]
struct Options {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: ServeOptions,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve until SIGTERM or SIGINT (the default)
    Serve(ServeOptions),
    /// Say what is wrong with a configuration file, without starting anything; what `rekindle config check` runs
    CheckConfig {
        /// The configuration file [default: /etc/rekindle/rekindled.toml]
        file: Option<PathBuf>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Serve one client; started by the daemon only
    #[command(hide = true)]
    Worker {
        /// The inherited descriptor of the channel to the daemon
        #[arg(long)]
        channel_fd: RawFd,
        /// The driver library to load
        #[arg(long)]
        cuda_driver: PathBuf,
        /// Show each GPU as so many virtual ones, and of these the ones with these UUIDs: 2, or 2:GPU-...,GPU-...
        #[arg(long)]
        virtual_gpus: Option<worker::VirtualGpus>,
        /// The privileges to give up, as JSON [default: none]
        #[arg(long)]
        confined: Option<Confinement>,
        /// Compare what commands write with the prediction, up to this many bytes of GPU memory; or `reads`
        #[arg(long)]
        report_access: Option<worker::Reporting>,
    },
    /// Have the driver checkpoint processes that use it; started by the daemon only
    #[command(hide = true)]
    Native {
        /// The inherited descriptor of the channel to the daemon
        #[arg(long)]
        channel_fd: RawFd,
        /// The driver library to load
        #[arg(long)]
        library: PathBuf,
    },
    /// Ask the machine's NVML; started by the daemon only
    #[command(hide = true)]
    Nvml {
        /// The inherited descriptor of the channel to the daemon
        #[arg(long)]
        channel_fd: RawFd,
        /// The NVML library to load
        #[arg(long)]
        library: PathBuf,
    },
}

/// The command line, of which the manual is made.
#[must_use]
pub fn command() -> clap::Command {
    Options::command()
}

/// The program.
#[must_use]
pub fn main() -> ExitCode {
    let options = Options::parse();
    match &options.command {
        None | Some(Command::Serve(_)) => log::to_journal_or_stderr(),
        Some(_) => log::to_stderr(),
    }
    match options.command {
        Some(Command::Worker { channel_fd, cuda_driver, virtual_gpus, confined, report_access }) => {
            with_channel(channel_fd, |channel| {
                worker::main(channel, cuda_driver, virtual_gpus, confined, report_access)
            })
        }
        Some(Command::Nvml { channel_fd, library }) => {
            with_channel(channel_fd, |channel| nvml::main(channel, &library))
        }
        Some(Command::Native { channel_fd, library }) => {
            with_channel(channel_fd, |channel| native::main(channel, &library))
        }
        Some(Command::CheckConfig { file, json }) => check_config(file.as_deref(), json),
        Some(Command::Serve(serve)) => serve_with(serve),
        None => serve_with(options.serve),
    }
}

fn with_channel(fd: RawFd, main: impl FnOnce(UnixStream) -> ExitCode) -> ExitCode {
    match inherited_channel(fd) {
        Ok(channel) => main(channel),
        Err(reason) => {
            error!("--channel-fd {fd}: {reason}; workers are started by rekindled only");
            ExitCode::from(2)
        }
    }
}

fn serve_with(options: ServeOptions) -> ExitCode {
    let config = match Config::load(options) {
        Ok(config) => config,
        Err(reason) => {
            error!("{reason}");
            return ExitCode::from(2);
        }
    };
    match daemon::serve(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            error!("{reason}");
            ExitCode::from(reason.exit_code())
        }
    }
}

/// The exit codes are those of `rekindle`.
fn check_config(file: Option<&Path>, json: bool) -> ExitCode {
    let report = match Report::of(file, &Host::here()) {
        Ok(report) => report,
        Err(error) => {
            eprintln!("rekindled: {error}");
            return ExitCode::FAILURE;
        }
    };
    let text = if json { serde_json::to_string_pretty(&report).map(|it| it + "\n") } else { Ok(report.to_string()) };
    let printed = text.map_err(std::io::Error::from).and_then(|it| std::io::stdout().write_all(it.as_bytes()));
    match printed {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            eprintln!("rekindled: cannot write to standard output: {error}");
            ExitCode::FAILURE
        }
        _ if report.is_ok() => ExitCode::SUCCESS,
        _ => ExitCode::from(3),
    }
}

/// The descriptor that the daemon left open for us. Checked, since a number from a command line can be anything.
fn inherited_channel(fd: RawFd) -> std::io::Result<UnixStream> {
    if fd <= libc::STDERR_FILENO {
        return Err(std::io::Error::other("not a descriptor of the daemon's"));
    }
    // SAFETY: sets a flag of a descriptor; on one that is not open it fails.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: open, as just seen, and nothing else in this process, which has only begun, knows of it.
    let channel = unsafe { UnixStream::from_raw_fd(fd) };
    // Fails unless it is a Unix socket.
    channel.local_addr()?;
    Ok(channel)
}

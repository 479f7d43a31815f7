//! `rekindle restore`: checks that a directory has an image, and has CRIU restore it.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};
use clap::Args;
use rekindle_images::Image;
use rekindle_wire::control::{ALLOW_VARIABLE, Allowances, Request};

use crate::failure::Failure;
use crate::{criu, daemon, image, output};

/// CRIU's log, in the image's directory.
const LOG: &str = "restore.log";

/// The options of `rekindle restore`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The image directory
    dir: PathBuf,
    /// Return when the processes run, without waiting for their end
    #[arg(short = 'd', long)]
    restore_detached: bool,
    /// Read the whole image and compare every hash before starting anything
    #[arg(long)]
    verify: bool,
    /// Allow another version of the GPU driver than at the dump. Addresses of functions that the program has stored in GPU
    /// memory may then be wrong without a warning
    #[arg(long)]
    allow_other_driver: bool,
    /// Allow GPUs of another model, number of multiprocessors or memory size than at the dump
    #[arg(long)]
    allow_other_gpu: bool,
    /// The criu program [default: the one in PATH]
    #[arg(long, value_name = "PATH")]
    criu: Option<PathBuf>,
    #[command(flatten)]
    daemon: daemon::At,
    /// More options for `criu restore`
    #[arg(last = true)]
    more: Vec<OsString>,
}

/// Restores an image.
pub(crate) fn restore(options: &Options) -> Result<(), Failure> {
    let socket = options.daemon.socket()?;
    let criu = criu::program(options.criu.as_deref())?;
    let libdir = criu::libdir_option()?;
    Image::open(&options.dir)?.check_companion()?;
    if options.verify {
        image::verify_before(&options.dir)?;
    }
    daemon::ask(&socket, &Request::Status)?;
    let dir = options.dir.canonicalize().with_context(|| format!("cannot find {}", options.dir.display()))?;
    let log = dir.join(LOG);
    let _ = fs::remove_file(&log);
    // A tree that is a session of its own is restored as one, whether this is said or not.
    let mut command = Command::new(&criu);
    command.args(["restore", "--shell-job", "--images-dir"]).arg(&dir).arg("--log-file").arg(&log);
    if options.restore_detached {
        command.arg("--restore-detached");
    }
    if let Some(libdir) = libdir {
        command.arg("--libdir").arg(libdir);
    }
    let allowances = Allowances { other_driver: options.allow_other_driver, other_gpu: options.allow_other_gpu };
    if allowances != Allowances::default() {
        command.env(ALLOW_VARIABLE, allowances.to_string());
    }
    command.args(&options.more).env("REKINDLE_SOCKET", &socket).stdout(Stdio::inherit());
    let status = command.status().with_context(|| format!("cannot run {}", criu.display()))?;
    if status.success() {
        return Ok(());
    }
    let errors = criu::errors(&String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()));
    errors.iter().skip(1).for_each(|it| eprintln!("  {}", output::plain(it)));
    let reason = errors.first().cloned().unwrap_or_else(|| format!("criu ended with {status}"));
    Err(anyhow!("cannot restore the image in {}: {reason}", dir.display()).into())
}

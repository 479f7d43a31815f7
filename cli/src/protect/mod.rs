//! `rekindle protect`: checkpoints a job again and again, and restores it when it fails.
//!
//! ```text
//!   rekindle protect PID ───────────────┐ makes the folder of a protection, with its record
//!   rekindle protect --container NAME ──┤
//!   rekindle protect --command -- … ────┤                      ▲ follows the job's output, and waits for its end
//!                                       ▼
//!   guard ──── keeps at work ───► supervisor ──── starts ───► rekindle checkpoint, verify, flatten, restore, images copy
//!     ▲ inherits the job              │ decides by rekindle-protect, and notes what it has done
//!     └── the job                     ▼
//!                                   record.json
//! ```
//!
//! Supervisors are no children of the daemon: they run CRIU, which needs rights that the daemon's service does not have, and go on
//! while the daemon is restarted. The daemon tells them what its configuration says, and which workers the job has.
//!
//! A file imports only from lines below its own:
//!
//! ```text
//!   protected
//!   begin, end, show
//!   supervisor        console
//!   checks
//!   uploads           guard
//!   images, job
//!   verbs, ended, folder, options
//!   archive, container
//! ```

mod archive;
mod begin;
mod checks;
mod console;
mod container;
mod end;
mod ended;
mod folder;
mod guard;
mod images;
mod job;
mod options;
mod protected;
mod show;
mod supervisor;
mod uploads;
mod verbs;

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::anyhow;
use clap::Args;

use self::folder::Folder;
pub(crate) use self::options::Options;
pub(crate) use self::protected::must_not_be_protected;
use crate::failure::Failure;

/// What this program gives itself.
#[derive(Debug, Args)]
pub(crate) struct Inner {
    /// The folder of the protection
    folder: PathBuf,
}

/// The program.
pub(crate) fn protect(options: &Options) -> Result<(), Failure> {
    if let Some(name) = &options.container {
        return begin::container(options, name);
    }
    if let Some(pid) = options.pid {
        return begin::process(options, pid);
    }
    if options.command {
        return begin::command(options);
    }
    let all = begin::configuration(&options.daemon.socket()?)?.dir;
    match (&options.stop, &options.forget, &options.supervise) {
        (Some(name), ..) => end::stop(&all, name),
        (_, Some(name), _) => end::forget(&all, name),
        (.., Some(name)) => guard::guard(Folder::named(&all, name)?.path()),
        _ if options.list => show::list(&all, options.json),
        _ => Err(Failure::usage(anyhow!(
            "give a process, --container, --command -- PROGRAM, --list, --stop or --forget"
        ))),
    }
}

/// Runs a command, protected: `rekindle run --protect`, with the arguments of `rekindle protect`.
pub(crate) fn run(line: Vec<OsString>) -> Result<(), Failure> {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }
    let line: Line = clap::Parser::try_parse_from(std::iter::once("protect".into()).chain(line))
        .map_err(|error| Failure::usage(anyhow!("{error}")))?;
    protect(&line.options)
}

/// Guards a protection.
pub(crate) fn guard(inner: &Inner) -> Result<(), Failure> {
    guard::guard(&inner.folder)
}

/// Supervises a protection.
pub(crate) fn supervisor(inner: &Inner) -> Result<(), Failure> {
    supervisor::supervise(&inner.folder)
}

/// Becomes the command of a protection.
pub(crate) fn job(inner: &Inner) -> Result<(), Failure> {
    begin::job(&inner.folder)
}

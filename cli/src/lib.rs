//! The `rekindle` command line.
//!
//! | exit code | |
//! |---|---|
//! | 0 | done |
//! | 1 | failed, nothing changed |
//! | 2 | wrong usage |
//! | 3 | refused: it cannot be done, and why |
//! | 4 | the image is bad |
//!
//! `run` becomes the command, whose exit code is then its own; `protect --command` ends with that of its command.

mod access;
mod bar;
mod builds;
mod calls;
mod check;
mod checkpoint;
mod config;
mod cpu_image;
mod criu;
mod cut;
mod daemon;
mod descriptors;
mod doctor;
mod engine;
#[cfg(test)]
mod explore;
mod failure;
mod flatten;
mod image;
mod images;
mod lazy_pages;
mod migrate;
mod network;
mod output;
mod owner;
mod podman;
mod pool;
mod process;
mod protect;
mod protocol;
mod ps;
mod random;
mod restore;
mod run;
mod span;
mod suspend;
mod tls;
mod warm;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Checkpoint and restore GPU processes while they run.
#[derive(Debug, Parser)]
#[command(name = "rekindle", version)]
struct Options {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run a program so that its GPU state can be checkpointed
    Run(run::Options),
    /// List the processes that run under Rekindle
    Ps(ps::Options),
    /// Check whether a process and its descendants can be checkpointed now
    Check(check::Options),
    /// Checkpoint a process and its descendants, or a container, while it runs
    Checkpoint(checkpoint::Options),
    /// Restore processes from a checkpoint image
    Restore(restore::Options),
    /// Checkpoint a job again and again, and restore it when it fails
    Protect(protect::Options),
    /// Move a process and its descendants to another host while they run
    Migrate(migrate::Options),
    /// Checkpoint process trees on several hosts, which talk over TCP, at one moment, and restore them together
    Cut(cut::Options),
    /// The way to other hosts by TLS, for `migrate` and `cut`
    Tls(tls::Options),
    /// Give the GPU memory of processes back to the GPU while they live on; their next GPU command brings it back
    Suspend(suspend::Suspend),
    /// Bring the GPU memory of suspended processes back now
    Resume(suspend::Resume),
    /// Keep an image ready for restores, or list those that are
    Warm(warm::Options),
    /// List the kinds of workers that the daemon keeps ready
    Pool(pool::Options),
    /// Show or choose the protocol by which a process is checkpointed
    Protocol(protocol::Options),
    /// Check the daemon's configuration file
    Config(config::Options),
    /// Check that this machine has what Rekindle needs, and say what to do if not
    Doctor(doctor::Options),
    /// List the builds of Rekindle's libraries on this machine, add one, or remove those that nobody needs
    Builds(builds::Options),
    /// Show the contents of a checkpoint image
    Inspect {
        /// The image directory, as given to `criu dump`
        dir: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Read a whole image and compare every hash
    Verify {
        /// The image directory
        dir: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Make an image that builds on other images independent of them
    Flatten {
        /// The image directory
        dir: PathBuf,
        /// Write a copy, with CRIU's files, to this directory [default: change the image itself]
        out: Option<PathBuf>,
    },
    /// Images in stores: directories, S3 and other hosts, where all images share their content
    Images(images::Options),
    /// Guard CRIU's server of pages: what `restore --lazy` starts
    #[command(hide = true)]
    LazyPages(lazy_pages::Options),
    /// Take part in a cut: what `cut` runs on each host
    #[command(hide = true)]
    CutPart(cut::Part),
    /// Guard a tree that is dumped: what `cut-part` starts
    #[command(hide = true)]
    CutGuard(cut::Guard),
    /// Have CRIU wait for other hosts: its action script
    #[command(hide = true)]
    CutGate(cut::Gate),
    /// Guard addresses that move: what `migrate` starts
    #[command(hide = true)]
    MigrateGuard(migrate::Guard),
    /// Guard a protection: what `protect` starts
    #[command(hide = true)]
    ProtectGuard(protect::Inner),
    /// Supervise a protection: what its guard starts
    #[command(hide = true)]
    ProtectSupervisor(protect::Inner),
    /// Become the command of a protection: what its guard starts
    #[command(hide = true)]
    ProtectJob(protect::Inner),
}

/// The command line, of which the manual is made.
#[must_use]
pub fn command() -> clap::Command {
    Options::command()
}

/// The program.
#[must_use]
pub fn main() -> ExitCode {
    let result = match Options::parse().verb {
        Verb::Run(options) if options.is_protected() => options.as_protection().and_then(protect::run),
        Verb::Run(options) => run::run(options),
        Verb::Ps(options) => ps::ps(&options),
        Verb::Check(options) => check::check(&options),
        Verb::Checkpoint(options) => checkpoint::checkpoint(&options),
        Verb::Restore(options) => restore::restore(&options),
        Verb::Migrate(options) => migrate::migrate(&options),
        Verb::Cut(options) => cut::cut(&options),
        Verb::CutPart(options) => cut::part(&options),
        Verb::CutGuard(options) => cut::guard(&options),
        Verb::CutGate(options) => cut::gate(&options),
        Verb::Tls(options) => tls::tls(&options),
        Verb::Suspend(options) => suspend::suspend(&options),
        Verb::Resume(options) => suspend::resume(&options),
        Verb::Warm(options) => warm::warm(&options),
        Verb::Pool(options) => pool::pool(&options),
        Verb::Protocol(options) => protocol::protocol(&options),
        Verb::Config(options) => config::config(&options),
        Verb::Doctor(options) => doctor::doctor(&options),
        Verb::Builds(options) => builds::builds(&options),
        Verb::Inspect { dir, json } => image::inspect(&dir, json),
        Verb::Verify { dir, json } => image::verify(&dir, json),
        Verb::Flatten { dir, out } => flatten::flatten(&dir, out.as_deref()),
        Verb::Images(options) => images::images(&options),
        Verb::LazyPages(options) => lazy_pages::serve(&options),
        Verb::Protect(options) => protect::protect(&options),
        Verb::MigrateGuard(options) => migrate::guard(&options),
        Verb::ProtectGuard(inner) => protect::guard(&inner),
        Verb::ProtectSupervisor(inner) => protect::supervisor(&inner),
        Verb::ProtectJob(inner) => protect::job(&inner),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output::warn(&failure);
            failure.exit_code()
        }
    }
}

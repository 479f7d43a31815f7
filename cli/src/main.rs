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
//! `run` becomes the command, whose exit code is then its own.

mod access;
mod calls;
mod check;
mod checkpoint;
mod cpu_image;
mod criu;
mod daemon;
mod descriptors;
mod doctor;
mod failure;
mod flatten;
mod image;
mod output;
mod protocol;
mod ps;
mod restore;
mod run;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Checkpoints GPU processes while they run.
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
    /// Say whether a process and its children can be checkpointed now
    Check(check::Options),
    /// Checkpoint a process and all below it, or a container, while it runs
    Checkpoint(checkpoint::Options),
    /// Restore what was checkpointed
    Restore(restore::Options),
    /// Say which protocol a process is to be checkpointed by, or choose one
    Protocol(protocol::Options),
    /// Say whether everything that Rekindle needs is there, and what to do where it is not
    Doctor(doctor::Options),
    /// Show what is in a checkpoint image
    Inspect {
        /// The image's directory: the one that `criu dump` was given
        dir: PathBuf,
        /// For programs
        #[arg(long)]
        json: bool,
    },
    /// Read a whole image and compare every checksum
    Verify {
        /// The image's directory
        dir: PathBuf,
        /// For programs
        #[arg(long)]
        json: bool,
    },
    /// Make an image that builds on others one that needs no other
    Flatten {
        /// The image's directory
        dir: PathBuf,
        /// A directory for a copy of it, with CRIU's files; otherwise the image itself is changed
        out: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    let result = match Options::parse().verb {
        Verb::Run(options) => run::run(options),
        Verb::Ps(options) => ps::ps(&options),
        Verb::Check(options) => check::check(&options),
        Verb::Checkpoint(options) => checkpoint::checkpoint(&options),
        Verb::Restore(options) => restore::restore(&options),
        Verb::Protocol(options) => protocol::protocol(&options),
        Verb::Doctor(options) => doctor::doctor(&options),
        Verb::Inspect { dir, json } => image::inspect(&dir, json),
        Verb::Verify { dir, json } => image::verify(&dir, json),
        Verb::Flatten { dir, out } => flatten::flatten(&dir, out.as_deref()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("rekindle: {failure}");
            failure.exit_code()
        }
    }
}

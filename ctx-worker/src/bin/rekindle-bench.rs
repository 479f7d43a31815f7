//! `rekindle-bench`: measures parts of the worker by themselves, for `scripts/bench`. It prints JSON, and needs no daemon.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use rekindle_ctx_worker::bench;

/// Measure parts of Rekindle's worker by themselves
#[derive(Debug, Parser)]
#[command(name = "rekindle-bench", version)]
enum Command {
    /// Measure the hashing kernels, as JSON
    Hash {
        /// The driver library to load
        #[arg(long)]
        cuda_driver: PathBuf,
        /// A size to hash, in KiB
        #[arg(long = "kib", required = true)]
        sizes: Vec<u64>,
        /// The largest piece with a hash of its own, in KiB
        #[arg(long, default_value_t = 65536)]
        piece_kib: u64,
        /// How often each is measured
        #[arg(long, default_value_t = 9)]
        repeats: usize,
    },
    /// Measure the copy engine beside the link, as JSON
    Link {
        /// The driver library to load
        #[arg(long)]
        cuda_driver: PathBuf,
        /// A size to copy, in MiB
        #[arg(long = "mib", required = true)]
        sizes: Vec<u64>,
        /// How often each is measured
        #[arg(long, default_value_t = 5)]
        repeats: usize,
    },
    /// Measure how fast files are written, as JSON
    Write {
        /// Where
        #[arg(long)]
        dir: PathBuf,
        /// How much, in MiB
        #[arg(long)]
        mib: u64,
        /// With so many threads
        #[arg(long, required = true)]
        threads: Vec<usize>,
        /// How often each is measured
        #[arg(long, default_value_t = 3)]
        repeats: usize,
    },
}

fn main() -> ExitCode {
    let mib = |mib: u64| mib.saturating_mul(1 << 20);
    let measured = match Command::parse() {
        Command::Hash { cuda_driver, sizes, piece_kib, repeats } => {
            let bytes = |kib: u64| kib.saturating_mul(1024);
            let sizes: Vec<u64> = sizes.into_iter().map(bytes).collect();
            bench::hash(&cuda_driver, &sizes, bytes(piece_kib), repeats)
        }
        Command::Link { cuda_driver, sizes, repeats } => {
            let sizes: Vec<u64> = sizes.into_iter().map(mib).collect();
            bench::link(&cuda_driver, &sizes, repeats)
        }
        Command::Write { dir, mib: size, threads, repeats } => bench::write(&dir, mib(size), &threads, repeats),
    };
    match measured {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rekindle-bench: {error}");
            ExitCode::from(1)
        }
    }
}

//! Measurements that need no daemon and no client, for `rekindle-bench`. Each measurement prints JSON.

use std::path::Path;

use thiserror::Error;

use crate::checkpoint::access::bench as hash;
use crate::checkpoint::engine::{bench as link, sinks};

/// Why a measurement failed.
#[derive(Debug, Error)]
#[error(transparent)]
pub struct BenchError(#[from] link::BenchError);

/// Measures the hashing kernels on regions of these sizes in bytes, with a hash for each `piece` of them.
///
/// # Errors
/// The driver is missing or fails, or a hash is wrong.
pub fn hash(driver: &Path, sizes: &[u64], piece: u64, repeats: usize) -> Result<(), BenchError> {
    Ok(hash::bench(driver, sizes, piece, repeats)?)
}

/// Measures how fast the copy engine transfers regions of these sizes from device memory to the host, and how fast the link
/// is.
///
/// # Errors
/// The driver is missing or fails, or a copy is wrong.
pub fn link(driver: &Path, sizes: &[u64], repeats: usize) -> Result<(), BenchError> {
    Ok(link::bench(driver, sizes, repeats)?)
}

/// Measures how fast files in a folder take `bytes` bytes from each number of threads.
///
/// # Errors
/// A file cannot be written.
pub fn write(dir: &Path, bytes: u64, threads: &[usize], repeats: usize) -> Result<(), BenchError> {
    Ok(sinks::bench(dir, bytes, threads, repeats)?)
}

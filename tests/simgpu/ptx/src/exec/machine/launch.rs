//! The properties of a launch that its threads have in common.

use super::row::Row;
use crate::launch::Env;
use crate::memory::Memory;

/// The properties of a launch that every thread sees.
pub(crate) struct Launch<'l> {
    /// Rows of constants of the program, all lanes alike.
    pub(crate) constants: &'l [u64],
    /// The program's lists of rows: vectors that are loaded or stored.
    pub(crate) lists: &'l [Row],
    pub(crate) memory: &'l dyn Memory,
    pub(crate) env: &'l Env<'l>,
    pub(crate) params: &'l [u8],
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) cluster: [u32; 3],
    pub(crate) dynamic_shared: u32,
    pub(crate) shared_bytes: u32,
    /// The words behind [`GRID_WINDOW`](crate::GRID_WINDOW): a size, and the barrier.
    pub(crate) grid_words: *mut u64,
}

/// How many bytes lie behind [`GRID_WINDOW`](crate::GRID_WINDOW).
pub(crate) const GRID_BYTES: u64 = 64;

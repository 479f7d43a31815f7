//! The shape of a launch: its blocks and threads.

use rekindle_cuda_abi::types::CUDA_ERROR_INVALID_VALUE;

use crate::status::{Result, ensure};

/// The shape of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Blocks in x, y and z.
    pub(crate) grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub(crate) block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub(crate) shared: u32,
    /// Whether all blocks must be resident together.
    pub(crate) cooperative: bool,
    /// Blocks of a cluster in x, y and z.
    pub(crate) cluster: [u32; 3],
}

impl Shape {
    /// The shape of a launch without attributes.
    pub(crate) fn plain(grid: [u32; 3], block: [u32; 3], shared: u32) -> Self {
        Self { grid, block, shared, cooperative: false, cluster: [1; 3] }
    }

    /// Whether the grid consists of whole clusters.
    pub(crate) fn check_clusters(&self) -> Result<()> {
        let divides = self.grid.iter().zip(self.cluster).all(|(grid, cluster)| grid.is_multiple_of(cluster));
        ensure(divides, CUDA_ERROR_INVALID_VALUE)
    }
}

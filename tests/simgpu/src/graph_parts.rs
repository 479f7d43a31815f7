//! Parameters of graphs' nodes, as launches and copies take them.

use rekindle_cuda_abi::launch::{CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_COOPERATIVE};
use rekindle_cuda_abi::types::{CUlaunchAttributeValue, CudaMemcpy3d};
use rekindle_graphs::Kernel;

use crate::copy::Side;
use crate::execution::launch::Shape;
use crate::status::Result;

/// The launch shape of a node.
pub(crate) fn shape(kernel: &Kernel) -> Result<Shape> {
    let mut shape = Shape::plain(kernel.grid, kernel.block, kernel.shared_bytes);
    let value = |id| kernel.attributes.get(&id);
    shape.cooperative = value(CU_LAUNCH_ATTRIBUTE_COOPERATIVE).is_some_and(|it| it.word() != 0);
    shape.cluster = value(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).map_or([1; 3], CUlaunchAttributeValue::cluster);
    shape.check_clusters()?;
    Ok(shape)
}

/// Destination and source of a copy, and its size.
pub(crate) fn sides(copy: &CudaMemcpy3d) -> Result<([Side; 2], [usize; 3])> {
    let size = [copy.width, copy.height, copy.depth];
    Ok(([Side::described(&copy.dst, size)?, Side::described(&copy.src, size)?], size))
}

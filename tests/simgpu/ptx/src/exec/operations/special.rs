//! Special registers.

use crate::GRID_WINDOW;
use crate::exec::machine::{Exec, LANES, Lane, Launch, Row, SPECIAL};

/// A special register that does not change while a warp runs.
#[derive(Debug, Clone, Copy)]
enum Fixed {
    Thread(usize),
    Lane,
    MaskEq,
    MaskLt,
    MaskLe,
    MaskGt,
    MaskGe,
    Warp,
    Block(usize),
    Cluster(usize),
    BlockInCluster(usize),
    ClusterRank,
    Processor,
    Threads(usize),
    Blocks(usize),
    Warps,
    Processors,
    Grid,
    DynamicShared,
    TotalShared,
    GridHigh,
    GridLow,
    Clusters(usize),
    ClusterSize(usize),
    ClusterBlocks,
    Zero,
    DynamicBase,
}

impl Fixed {
    fn differs_by_lane(self) -> bool {
        use Fixed::{Lane, MaskEq, MaskGe, MaskGt, MaskLe, MaskLt, Thread};
        matches!(self, Thread(_) | Lane | MaskEq | MaskLt | MaskLe | MaskGt | MaskGe)
    }
}

/// The names of the registers. Each has a row of 32 words in the warp's special region, in this order.
const FIXED: &[(&str, Fixed)] = &[
    ("%tid.x", Fixed::Thread(0)),
    ("%tid.y", Fixed::Thread(1)),
    ("%tid.z", Fixed::Thread(2)),
    ("%laneid", Fixed::Lane),
    ("%lanemask_eq", Fixed::MaskEq),
    ("%lanemask_lt", Fixed::MaskLt),
    ("%lanemask_le", Fixed::MaskLe),
    ("%lanemask_gt", Fixed::MaskGt),
    ("%lanemask_ge", Fixed::MaskGe),
    ("%warpid", Fixed::Warp),
    ("%ntid.x", Fixed::Threads(0)),
    ("%ntid.y", Fixed::Threads(1)),
    ("%ntid.z", Fixed::Threads(2)),
    ("%nctaid.x", Fixed::Blocks(0)),
    ("%nctaid.y", Fixed::Blocks(1)),
    ("%nctaid.z", Fixed::Blocks(2)),
    ("%nwarpid", Fixed::Warps),
    ("%nsmid", Fixed::Processors),
    ("%gridid", Fixed::Grid),
    ("%dynamic_smem_size", Fixed::DynamicShared),
    ("%total_smem_size", Fixed::TotalShared),
    ("%aggr_smem_size", Fixed::TotalShared),
    ("%envreg0", Fixed::Zero),
    ("%envreg1", Fixed::GridHigh),
    ("%envreg2", Fixed::GridLow),
    ("%current_graph_exec", Fixed::Zero),
    ("%nclusterid.x", Fixed::Clusters(0)),
    ("%nclusterid.y", Fixed::Clusters(1)),
    ("%nclusterid.z", Fixed::Clusters(2)),
    ("%cluster_nctaid.x", Fixed::ClusterSize(0)),
    ("%cluster_nctaid.y", Fixed::ClusterSize(1)),
    ("%cluster_nctaid.z", Fixed::ClusterSize(2)),
    ("%cluster_nctarank", Fixed::ClusterBlocks),
    ("%reserved_smem_offset_begin", Fixed::Zero),
    ("%reserved_smem_offset_end", Fixed::Zero),
    ("%reserved_smem_offset_cap", Fixed::Zero),
    (DYNAMIC_BASE, Fixed::DynamicBase),
    // The registers from here on depend on the block.
    ("%ctaid.x", Fixed::Block(0)),
    ("%ctaid.y", Fixed::Block(1)),
    ("%ctaid.z", Fixed::Block(2)),
    ("%clusterid.x", Fixed::Cluster(0)),
    ("%clusterid.y", Fixed::Cluster(1)),
    ("%clusterid.z", Fixed::Cluster(2)),
    ("%cluster_ctaid.x", Fixed::BlockInCluster(0)),
    ("%cluster_ctaid.y", Fixed::BlockInCluster(1)),
    ("%cluster_ctaid.z", Fixed::BlockInCluster(2)),
    ("%cluster_ctarank", Fixed::ClusterRank),
    ("%smid", Fixed::Processor),
];
/// The number of registers that are the same for every block.
const BEFORE_BLOCK: usize = 37;
/// The beginning of dynamic shared memory, which depends on the kernel; no register of PTX.
pub(crate) const DYNAMIC_BASE: &str = "dynamic shared memory";

/// The number of words of a warp's special region.
pub(crate) const SPECIAL_WORDS: usize = FIXED.len() * LANES;

/// The row of a special register that does not change.
pub(crate) fn row(name: &str) -> Option<Row> {
    let index = FIXED.iter().position(|&(known, _)| known == name)?;
    Some(SPECIAL | (index * LANES) as u32)
}

/// The exec that reads a clock, and whether the clock has 64 bits.
pub(crate) fn clock(name: &str) -> Option<(Exec, bool)> {
    macro_rules! reads {
        (|$nanos:ident| -> $ty:ty $value:block) => {{
            let exec: Exec = |w, i| {
                w.poll();
                let $nanos = (w.launch.env.clock)();
                w.map0(i, || -> $ty { $value })
            };
            (exec, <$ty as Lane>::WIDE)
        }};
    }
    // A cycle is a nanosecond here.
    Some(match name {
        "%clock64" | "%globaltimer" => reads!(|nanos| -> u64 { nanos }),
        "%clock" | "%globaltimer_lo" => reads!(|nanos| -> u32 { nanos as u32 }),
        "%clock_hi" | "%globaltimer_hi" => reads!(|nanos| -> u32 { (nanos >> 32) as u32 }),
        _ => return None,
    })
}

/// Writes the registers that are the same for every block into the special region of a warp.
pub(crate) fn fill(words: &mut [u32], launch: &Launch<'_>, warp: u32) {
    write_rows(words, 0..BEFORE_BLOCK, launch, [0; 3], warp);
}

/// Writes the registers that depend on the block.
pub(crate) fn fill_block(words: &mut [u32], launch: &Launch<'_>, block: [u32; 3], warp: u32) {
    write_rows(words, BEFORE_BLOCK..FIXED.len(), launch, block, warp);
}

fn write_rows(words: &mut [u32], rows: std::ops::Range<usize>, launch: &Launch<'_>, block: [u32; 3], warp: u32) {
    let first = rows.start;
    for (&(_, register), words) in FIXED[rows].iter().zip(words[first * LANES..].chunks_exact_mut(LANES)) {
        if register.differs_by_lane() {
            for (lane, word) in words.iter_mut().enumerate() {
                *word = value(register, launch, block, warp, lane as u32);
            }
        } else {
            words.fill(value(register, launch, block, warp, 0));
        }
    }
}

fn value(register: Fixed, launch: &Launch<'_>, block: [u32; 3], warp: u32, lane: u32) -> u32 {
    let [x, y, _] = launch.block;
    let cluster = launch.cluster;
    let thread = warp * LANES as u32 + lane;
    let at_and_below = u32::MAX >> (31 - lane);
    let cooperative = !launch.grid_words.is_null();
    match register {
        Fixed::Thread(0) => thread % x,
        Fixed::Thread(1) => thread / x % y,
        Fixed::Thread(_) => thread / x / y,
        Fixed::Lane => lane,
        Fixed::MaskEq => 1 << lane,
        Fixed::MaskLt => at_and_below >> 1,
        Fixed::MaskLe => at_and_below,
        Fixed::MaskGt => !at_and_below,
        Fixed::MaskGe => !(at_and_below >> 1),
        Fixed::Warp => warp,
        Fixed::Block(axis) => block[axis],
        Fixed::Cluster(axis) => block[axis] / cluster[axis],
        Fixed::BlockInCluster(axis) => block[axis] % cluster[axis],
        Fixed::ClusterRank => {
            let at: [u32; 3] = std::array::from_fn(|axis| block[axis] % cluster[axis]);
            at[0] + cluster[0] * (at[1] + cluster[1] * at[2])
        }
        Fixed::Processor => block[0] % launch.env.multiprocessors.max(1),
        Fixed::Threads(axis) => launch.block[axis],
        Fixed::Blocks(axis) => launch.grid[axis],
        Fixed::Warps => launch.block.iter().product::<u32>().div_ceil(LANES as u32),
        Fixed::Processors => launch.env.multiprocessors,
        Fixed::Grid => launch.env.grid_id as u32,
        Fixed::DynamicShared => launch.dynamic_shared,
        Fixed::TotalShared => launch.shared_bytes,
        Fixed::GridHigh if cooperative => (GRID_WINDOW >> 32) as u32,
        Fixed::GridLow if cooperative => GRID_WINDOW as u32,
        Fixed::Clusters(axis) => launch.grid[axis] / cluster[axis],
        Fixed::ClusterSize(axis) => cluster[axis],
        Fixed::ClusterBlocks => cluster.iter().product(),
        Fixed::DynamicBase => launch.shared_bytes - launch.dynamic_shared,
        Fixed::GridHigh | Fixed::GridLow | Fixed::Zero => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_blocks_come_last() {
        let depends = |register: Fixed| {
            use Fixed::{Block, BlockInCluster, Cluster, ClusterRank, Processor};
            matches!(register, Block(_) | Cluster(_) | BlockInCluster(_) | ClusterRank | Processor)
        };
        for (index, &(name, register)) in FIXED.iter().enumerate() {
            assert_eq!(depends(register), index >= BEFORE_BLOCK, "{name}");
        }
    }
}

//! Execution: decoded instructions, and the state they work on.
//!
//! A file imports from its own layer and from those above it in this table.
//!
//! | layer | holds |
//! |---|---|
//! | `machine/` | rows of registers, memory, clusters, decoded instructions |
//! | `operations/` | the effect of each instruction on its lanes |
//! | `warp/` | fragments, barriers and collectives of a warp, and the loop that executes instructions |
//! | `block` | the warps of a block, their shared memory and barriers |
//! | `grid` | a launch, and the order in which its blocks run |
//!
//! The life of a launch: `grid` starts the blocks and gives them their turns, `block` the warps, and `warp/run.rs` executes
//! the instructions of a warp one after the other.

mod block;
pub(crate) mod grid;
pub(crate) mod machine;
pub(crate) mod operations;
mod warp;

//! The machine that instructions work on: rows of registers, memory, and decoded instructions.

mod cluster;
mod core;
mod inst;
mod launch;
mod map;
mod row;
mod space;

pub(crate) use self::cluster::{Cluster, RANK_SHIFT};
pub(crate) use self::core::{Core, Flow, POLL_COST};
pub(crate) use self::inst::{Action, BarrierOp, Builtin, Collective, Exec, Inst, Reduction, Signature, Test};
pub(crate) use self::launch::{GRID_BYTES, Launch};
pub(crate) use self::map::exec;
pub(crate) use self::row::{CONSTANT, LANES, Lane, Lanes, NO_ROW, Row, SPECIAL};
pub(crate) use self::space::{Access, LocalMemory, SharedMemory};

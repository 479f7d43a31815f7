//! What belongs to one client besides memory and code: its objects and their log, its streams, and how its commands end.

pub mod failure;
pub(crate) mod lives;
pub(crate) mod memory_pressure;
pub(crate) mod objects;
pub(crate) mod outcome;
pub mod share;
pub(crate) mod state;
pub(crate) mod waiting;

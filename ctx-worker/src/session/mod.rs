//! What belongs to one client besides memory and code: its objects and their log, and what it may have.

pub(crate) mod limits;
pub(crate) mod lives;
pub(crate) mod memory_pressure;
pub(crate) mod objects;
pub mod share;

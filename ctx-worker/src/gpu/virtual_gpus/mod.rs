//! Virtual GPUs: a layer above the driver that shows each GPU of the machine as several.
//!
//! ```text
//!   the worker ──► Driver (the table) ──► calls.rs ──► Layer ──► the driver's own table
//!                      └── calls that name no device go straight to the driver ──┘
//! ```
//!
//! [`show`] exchanges the functions of the driver's table that name a device, directly or in a structure. Everything above
//! the table finds that many devices more, and knows nothing of the layer.
//!
//! | file | holds |
//! |---|---|
//! | `settings.rs` | how many virtual GPUs there are of each GPU, and which a worker sees |
//! | `identity.rs` | the UUID and the PCI address of a virtual GPU |
//! | `layer.rs` | the virtual GPUs of this worker, and what the driver's calls do on them |
//! | `contexts.rs` | which context belongs to which virtual GPU, and which contexts use each other's memory |
//! | `rights.rs` | which virtual GPU may access which mapping |
//! | `calls.rs` | the functions that replace the driver's in the table |
//!
//! The first virtual GPU of a GPU that the worker sees has the GPU's primary context. Each other one has a context that
//! stands for its primary context; a reset destroys it and makes another. A worker that sees one virtual GPU of each GPU thus
//! works as on the GPU itself.

mod calls;
mod contexts;
mod error;
mod identity;
mod layer;
mod rights;
mod settings;

use super::driver::Driver;
pub(crate) use error::VirtualError;
pub(crate) use settings::Uuid;
pub use settings::VirtualGpus;

/// The driver with virtual GPUs.
pub(crate) struct Shown {
    pub(crate) driver: Driver,
    /// For each device, the UUID of the GPU that it is a part of.
    pub(crate) parts_of: Vec<Uuid>,
}

/// Initialises the driver, and returns a table that shows its GPUs as several.
pub(crate) fn show(real: Driver, settings: &VirtualGpus) -> Result<Shown, VirtualError> {
    let layer = layer::Layer::new(real, settings)?;
    let parts_of = layer.gpus().iter().map(|gpu| gpu.part_of).collect();
    calls::install(layer).map_err(|_| VirtualError::Twice)?;
    Ok(Shown { driver: calls::over(real), parts_of })
}

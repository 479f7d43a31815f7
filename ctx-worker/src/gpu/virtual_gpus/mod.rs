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
mod identity;
mod layer;
mod rights;

use std::fmt;
use std::str::FromStr;

use rekindle_wire::gpus;
use rekindle_wire::window::MAX_DEVICES;
use thiserror::Error;

use super::driver::{CallFailed, Driver};

/// The UUID of a GPU.
pub(crate) type Uuid = [u8; 16];

/// How a worker shows GPUs, as its daemon passes it on the command line: `4`, or `4:GPU-...,GPU-...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualGpus {
    /// How many virtual GPUs each GPU is.
    pub per_gpu: u32,
    /// The UUIDs of the virtual GPUs that the worker sees, in its order; `None`: all.
    pub visible: Option<Vec<Uuid>>,
}

impl VirtualGpus {
    /// The most virtual GPUs of one GPU: their PCI domains differ in four bits, and 0 there is the GPU itself.
    pub const MOST: u32 = 15;
}

/// The text says nothing of virtual GPUs.
#[derive(Debug, Error)]
#[error("neither a number from 2 to 15, nor such a number, a colon and a list of UUIDs")]
pub struct NoVirtualGpus;

impl fmt::Display for VirtualGpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.per_gpu.fmt(f)?;
        match &self.visible {
            Some(uuids) => write!(f, ":{}", uuids.iter().map(gpus::name).collect::<Vec<_>>().join(",")),
            None => Ok(()),
        }
    }
}

impl FromStr for VirtualGpus {
    type Err = NoVirtualGpus;

    fn from_str(text: &str) -> Result<Self, NoVirtualGpus> {
        let (number, list) = text.split_once(':').map_or((text, None), |(number, list)| (number, Some(list)));
        let per_gpu = number.parse().ok().filter(|it| (2..=Self::MOST).contains(it)).ok_or(NoVirtualGpus)?;
        let visible = list.map(|list| list.split(',').map(gpus::uuid).collect::<Option<Vec<_>>>().ok_or(NoVirtualGpus));
        Ok(Self { per_gpu, visible: visible.transpose()? })
    }
}

/// Why virtual GPUs cannot be shown.
#[derive(Debug, Error)]
pub(crate) enum VirtualError {
    #[error(transparent)]
    Driver(#[from] CallFailed),
    #[error(
        "gpu.virtual = {per_gpu} shows {gpus} GPUs as {}, and a process can have {MAX_DEVICES}: lower gpu.virtual in the daemon's configuration",
        .gpus * *.per_gpu as usize
    )]
    TooMany { gpus: usize, per_gpu: u32 },
    #[error("there is no virtual GPU {0} here")]
    Unknown(String),
    #[error("this process shows virtual GPUs already")]
    Twice,
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_worker_shows_is_passed_on() {
        let some = Some(vec![[1; 16], [2; 16]]);
        for it in [VirtualGpus { per_gpu: 2, visible: None }, VirtualGpus { per_gpu: 15, visible: some }] {
            assert_eq!(it.to_string().parse::<VirtualGpus>().unwrap(), it);
        }
        for odd in ["", "1", "16", "2:", "2:GPU-1", "-2", "2:all"] {
            assert!(odd.parse::<VirtualGpus>().is_err(), "{odd}");
        }
    }
}

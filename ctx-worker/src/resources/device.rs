//! The worker's devices.

use rekindle_cuda_abi::types::*;

use crate::resources::memory::DeviceMemory;

/// One of the worker's devices.
pub(crate) struct Device {
    pub(crate) device: CUdevice,
    /// The driver's primary context, retained since the worker started.
    pub(crate) primary: CUcontext,
    /// The client has released it; a reset makes it new before the next use.
    pub(crate) used: bool,
    /// It has been reset: the driver then places code elsewhere than in a context of the worker's start, so a restore
    /// resets it too.
    pub(crate) reset: bool,
    pub(crate) capability: (u32, u32),
    pub(crate) memory: DeviceMemory,
}

//! The worker's devices.

use rekindle_cuda_abi::types::*;

use crate::resources::code_reserve::CodeReserve;
use crate::resources::memory::DeviceMemory;

/// A device of the worker's.
pub(crate) struct Device {
    pub(crate) device: CUdevice,
    /// The driver's primary context, retained since the worker started.
    pub(crate) primary: CUcontext,
    /// The client has released the context; a reset makes it new before the next use.
    pub(crate) used: bool,
    /// The context has been reset. The driver then places code elsewhere than in a context of the worker's start, so a
    /// restore resets the context too.
    pub(crate) reset: bool,
    /// The record of the client's log after which the driver placed the code of the worker's own kernels; 0 before all.
    pub(crate) placed_after: u64,
    /// The room that the driver has for the code of the primary context.
    pub(crate) code_reserve: CodeReserve,
    pub(crate) capability: (u32, u32),
    /// The memory that a client may have at most, whatever its limits are: a virtual GPU's part of its GPU.
    pub(crate) most: u64,
    pub(crate) memory: DeviceMemory,
}

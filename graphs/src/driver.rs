//! The library around this crate, and the functions that this crate needs of it.

use std::sync::OnceLock;

use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::steps::Flat;
use crate::task::{Copy, Fill, Kernel, Words};

/// Names a stream: its context, its handle, and the thread if it is the thread's default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamKey {
    /// The context it belongs to.
    pub context: CUcontext,
    /// Its handle.
    pub handle: CUstream,
    /// 0 unless it is a thread's default stream.
    pub thread: u64,
}

/// How a stream is ordered with the legacy default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The legacy default stream itself.
    Legacy,
    /// Ordered with it.
    Blocking,
    /// Not ordered with it.
    Free,
}

/// A stream that a parameter names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// Its name.
    pub key: StreamKey,
    /// Its kind.
    pub role: Role,
    /// Its priority.
    pub priority: i32,
}

/// The facts about a kernel.
#[derive(Clone, Debug, Default)]
pub struct KernelFacts {
    /// Its name, for messages.
    pub name: String,
    /// Offset and size of each parameter.
    pub layout: Vec<(u32, u32)>,
    /// The context of a function; 0 for a kernel, which has none.
    pub context: CUcontext,
}

/// The library around this crate.
pub trait Driver: Sync {
    /// Whether calls may be made; the current context, 0 for none.
    ///
    /// # Errors
    /// Before `cuInit`, in a forked child, and when the context is broken.
    fn current(&self) -> Result<CUcontext>;

    /// The stream that a parameter names, in the form of the call under way.
    ///
    /// # Errors
    /// The error of a stream that does not exist.
    fn stream(&self, stream: CUstream) -> Result<Stream>;

    /// The context of an event.
    ///
    /// # Errors
    /// The error of an event that does not exist.
    fn event(&self, event: CUevent) -> Result<CUcontext>;

    /// The facts about a kernel or function.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` where there is none.
    fn kernel(&self, function: u64) -> Result<KernelFacts>;

    /// The driver's immediate answer to a launch.
    ///
    /// # Errors
    /// As `cuLaunchKernel`.
    fn check_kernel(&self, kernel: &Kernel) -> Result<()>;

    /// The driver's immediate answer to a copy.
    ///
    /// # Errors
    /// As `cuMemcpy3D`.
    fn check_copy(&self, copy: &Copy) -> Result<()>;

    /// The driver's immediate answer to a memset.
    ///
    /// # Errors
    /// As `cuMemsetD8` and the like.
    fn check_fill(&self, fill: &Fill) -> Result<()>;

    /// The driver's immediate answer to operations on words.
    ///
    /// # Errors
    /// As `cuStreamBatchMemOp`.
    fn check_words(&self, words: &Words) -> Result<()>;

    /// Memory for an allocation node, on a device by its ordinal. Its address stays until [`Driver::release`].
    ///
    /// # Errors
    /// As `cuMemAlloc`.
    fn allocate(&self, device: CUdevice, bytes: usize) -> Result<CUdeviceptr>;

    /// Gives memory of an allocation node back.
    fn release(&self, address: CUdeviceptr);

    /// The ordinal of a context's device.
    ///
    /// # Errors
    /// Where there is no such context.
    fn device(&self, context: CUcontext) -> Result<CUdevice>;

    /// Whether an ordinal is a device's.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE`.
    fn is_device(&self, device: CUdevice) -> Result<()>;

    /// Makes a graph ready to be launched, and names it.
    ///
    /// # Errors
    /// As `cuGraphInstantiate`.
    fn instantiate(&self, flat: &Flat, flags: u64) -> Result<u64>;

    /// Takes up changes to the steps at these places.
    ///
    /// # Errors
    /// As `cuGraphExecUpdate`; nothing has changed then.
    fn update(&self, exec: u64, flat: &Flat, changed: &[usize]) -> Result<()>;

    /// Launches an executable graph.
    ///
    /// # Errors
    /// As `cuGraphLaunch`.
    fn launch(&self, exec: u64, flat: &Flat, stream: CUstream) -> Result<()>;

    /// Prepares a launch in a stream.
    ///
    /// # Errors
    /// As `cuGraphUpload`.
    fn upload(&self, exec: u64, stream: CUstream) -> Result<()>;

    /// Destroys the executable graph that [`Driver::instantiate`] made, once its launches have ended.
    fn destroy(&self, exec: u64);
}

static DRIVER: OnceLock<&'static dyn Driver> = OnceLock::new();

/// Sets the library around this crate. Only the first call counts.
pub fn register(driver: &'static dyn Driver) {
    let _ = DRIVER.set(driver);
}

/// The library around this crate.
pub(crate) fn driver() -> Result<&'static dyn Driver> {
    DRIVER.get().copied().ok_or(CUDA_ERROR_NOT_INITIALIZED)
}

//! Why the heap from which kernels take memory with `malloc` cannot be saved.

use thiserror::Error;

use crate::gpu::driver::CallFailed;

/// The largest heap that an image holds.
pub(crate) const MOST: u64 = 1 << 30;

/// Why a heap cannot be saved.
#[derive(Debug, Error)]
pub(crate) enum HeapError {
    #[error(
        "its kernels have a heap of {} MiB for malloc on the device, and an image holds {} MiB of it: see cudaLimitMallocHeapSize",
        .0 >> 20,
        MOST >> 20
    )]
    TooLarge(u64),
    #[error("it has launched a kernel that calls malloc on the device, and the memory for that was not found")]
    NotFound,
    #[error("it has launched a kernel that calls malloc on the device, and the memory for that was not found: {0}")]
    Driver(#[from] CallFailed),
}

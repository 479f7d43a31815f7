//! Copies of pieces of device memory and arrays, from and to the host.

use rekindle_cuda_abi::types::*;
use rekindle_images::{ImageError, PIECE_LENGTH};
use rekindle_wire::control::{Failing, FailureKind};
use thiserror::Error;

use crate::gpu::driver::{CallFailed, Driver, checked};
use crate::resources::boxes::ArrayPart;
use crate::session::failure;

/// Why a copy was not finished.
#[derive(Debug, Error)]
pub(crate) enum EngineError {
    #[error(transparent)]
    Driver(#[from] CallFailed),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("it was cancelled")]
    Cancelled,
    /// A job's memory has changed since the quiesce.
    #[error("mispredicted write: {length} bytes at {address:#x} were written while they were copied")]
    MispredictedWrite { address: u64, length: u64 },
    #[error("a copying thread failed")]
    Lost,
    #[error("no content is being loaded")]
    NothingToLoad,
    #[error("the device could not hash the content")]
    NotHashed,
    #[error("{length} bytes at {address:#x} are not what was read from the image: restore again")]
    NotArrived { address: u64, length: u64 },
    #[error("the copy of {length} bytes at {address:#x} is not what the device has there: try again")]
    NotCopied { address: u64, length: u64 },
    #[error("there is no thread to copy: the machine or the daemon's user has no more")]
    NoThread,
}

impl Failing for EngineError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Image(error) => failure::of_image(error),
            Self::Cancelled => FailureKind::GivenUp,
            Self::MispredictedWrite { .. } => FailureKind::Mispredicted,
            Self::Driver(_)
            | Self::Lost
            | Self::NothingToLoad
            | Self::NotHashed
            | Self::NotArrived { .. }
            | Self::NotCopied { .. }
            | Self::NoThread => FailureKind::Internal,
        }
    }
}

/// A piece of device memory to copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    /// The piece's first byte on the device.
    pub(crate) address: u64,
    /// The piece's place in its region.
    pub(crate) offset: u64,
    /// The length in bytes, at most [`PIECE_LENGTH`] when saving.
    pub(crate) length: u64,
    /// The worker's number of the device.
    pub(crate) device: usize,
    /// The driver's context to copy in.
    pub(crate) context: CUcontext,
    /// For a piece of an array: the part of the array, which has no address.
    pub(crate) array: Option<ArrayPart>,
}

impl Job {
    /// Copies the piece to the host, in stream order.
    ///
    /// # Safety
    /// The device has the piece, and `host` room for it until the copy is done.
    pub(crate) unsafe fn read(&self, driver: &Driver, host: *mut u8, stream: CUstream) -> Result<(), CallFailed> {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(array) = &self.array {
                let copy = array.copy(host, true);
                return checked("cuMemcpy3DAsync", (driver.cuMemcpy3DAsync_v2)(&raw const copy, stream));
            }
            let copied = (driver.cuMemcpyDtoHAsync_v2)(host.cast(), self.address, self.length as usize, stream);
            checked("cuMemcpyDtoHAsync", copied)
        }
    }

    /// Copies content from the host to the piece's place, in stream order.
    ///
    /// # Safety
    /// The device has room for the piece, and the content lives until the copy is done.
    pub(crate) unsafe fn write(&self, driver: &Driver, content: &[u8], stream: CUstream) -> Result<(), CallFailed> {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(array) = &self.array {
                let copy = array.copy(content.as_ptr().cast_mut(), false);
                return checked("cuMemcpy3DAsync", (driver.cuMemcpy3DAsync_v2)(&raw const copy, stream));
            }
            let copied = (driver.cuMemcpyHtoDAsync_v2)(self.address, content.as_ptr().cast(), content.len(), stream);
            checked("cuMemcpyHtoDAsync", copied)
        }
    }

    /// Sets the piece to zeros, in stream order.
    ///
    /// # Safety
    /// The device has the piece at its address: it is no part of an array.
    pub(crate) unsafe fn set_zero(&self, driver: &Driver, stream: CUstream) -> Result<(), CallFailed> {
        // SAFETY: the caller's promise.
        let set = unsafe { (driver.cuMemsetD8Async)(self.address, 0, self.length as usize, stream) };
        checked("cuMemsetD8Async", set)
    }
}

/// Cuts a region into jobs.
pub(crate) fn jobs(address: u64, size: u64, device: usize, context: CUcontext) -> impl Iterator<Item = Job> {
    (0..size.div_ceil(PIECE_LENGTH)).map(move |i| {
        let offset = i * PIECE_LENGTH;
        Job { address: address + offset, offset, length: PIECE_LENGTH.min(size - offset), device, context, array: None }
    })
}

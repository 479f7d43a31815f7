//! Host memory through which the content of managed memory passes between the client's pages and the device. The driver knows it, so
//! that devices copy to and from it at the link's speed; the driver does not allocate it, since a reset of a context would free it.

use std::ffi::c_void;
use std::ptr::NonNull;

use rekindle_cuda_abi::types::*;
use tracing::warn;

use crate::gpu::driver::Driver;

/// No smaller one is made.
const SMALLEST: usize = 2 << 20;

/// Memory that grows to what is needed.
#[derive(Debug, Default)]
pub(crate) struct Transit {
    place: Option<NonNull<u8>>,
    size: usize,
    /// Whether the driver knows it; none until it was asked to.
    registered: Option<bool>,
}

// SAFETY: the memory belongs to this value alone.
unsafe impl Send for Transit {}

impl Transit {
    /// So many bytes of it, with any content. The primary context of device 0 is current.
    pub(crate) fn bytes(&mut self, driver: &Driver, bytes: usize) -> std::io::Result<&mut [u8]> {
        const PORTABLE: u32 = 1;
        if bytes > self.size {
            self.release(driver);
            let size = bytes.next_power_of_two().max(SMALLEST);
            self.place = Some(map(size)?);
            self.size = size;
        }
        let Some(place) = self.place else { return Ok(&mut []) };
        if self.registered.is_none() {
            // SAFETY: it stays mapped as long as it is registered.
            let result = unsafe { (driver.cuMemHostRegister_v2)(place.as_ptr().cast(), self.size, PORTABLE) };
            self.registered = Some(result == CUDA_SUCCESS);
            if result != CUDA_SUCCESS {
                warn!(
                    "managed memory moves more slowly: the driver does not take the host memory for it (error {result})"
                );
            }
        }
        // SAFETY: mapped, of at least so many bytes, and borrowed with this value.
        Ok(unsafe { std::slice::from_raw_parts_mut(place.as_ptr(), bytes) })
    }

    /// Gives it back. No copy uses it. Called before a context is reset, too, in which the driver knows it.
    pub(crate) fn release(&mut self, driver: &Driver) {
        if let Some(place) = self.place.take() {
            if self.registered.take() == Some(true) {
                // SAFETY: registered by `bytes`.
                unsafe { (driver.cuMemHostUnregister)(place.as_ptr().cast()) };
            }
            // SAFETY: mapped by `map`, and no slice of it is left.
            unsafe { libc::munmap(place.as_ptr().cast(), self.size) };
        }
        self.size = 0;
    }
}

/// Maps memory, on huge pages where the kernel has some.
fn map(size: usize) -> std::io::Result<NonNull<u8>> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping replaces nothing.
    let place: *mut c_void = unsafe { libc::mmap(std::ptr::null_mut(), size, protection, flags, -1, 0) };
    let mapped = NonNull::new(place.cast::<u8>()).filter(|_| place != libc::MAP_FAILED);
    let mapped = mapped.ok_or_else(std::io::Error::last_os_error)?;
    // A fork would have this process write to other pages than the device.
    for advice in [libc::MADV_DONTFORK, libc::MADV_HUGEPAGE] {
        // SAFETY: what was just mapped.
        unsafe { libc::madvise(place, size, advice) };
    }
    Ok(mapped)
}

//! Lanes' buffers: memory that the worker maps and registers with the driver, so that devices copy straight into it.
//!
//! The driver does not allocate the memory, since a reset of the context would free it: a lane that writes from it may hang in
//! a disk at that time, and continues to read it when the disk responds again.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::types::*;
use rekindle_images::PIECE_LENGTH;

use super::stage::STAGE_END;
use crate::gpu::driver::{CallFailed, Driver, checked};

const SIZE: usize = PIECE_LENGTH as usize;
/// Where the first buffer is mapped: behind the stage. There, buffers do not change which addresses the driver finds for
/// itself.
const BUFFERS_AT: u64 = STAGE_END;

/// The buffers of all lanes.
#[derive(Clone, Default)]
pub(crate) struct Buffers(Arc<Mutex<Vec<Buffer>>>);

struct Buffer {
    place: u64,
    /// Whether the buffer is registered with the driver.
    registered: bool,
}

impl Buffers {
    /// The address of a lane's buffer, which is made if need be, and registered in the current context.
    pub(super) fn prepare(&self, driver: &Driver, lane: usize) -> Result<*mut u8, CallFailed> {
        const PORTABLE: u32 = 1;
        let mut buffers = self.lock();
        while buffers.len() <= lane {
            let wanted = BUFFERS_AT + (buffers.len() * SIZE) as u64;
            buffers.push(Buffer::map(wanted).ok_or(CallFailed { call: "mmap", code: CUDA_ERROR_OUT_OF_MEMORY })?);
        }
        let buffer = &mut buffers[lane];
        if !buffer.registered {
            // SAFETY: the buffer stays mapped as long as it is registered, or the process ends.
            let registered = unsafe { (driver.cuMemHostRegister_v2)(buffer.address(), SIZE, PORTABLE) };
            checked("cuMemHostRegister", registered)?;
            buffer.registered = true;
        }
        Ok(buffer.address().cast())
    }

    /// Removes the buffer at this address from the list, but leaves it mapped: a copy may still write to it. It is the last one.
    pub(super) fn abandon(&self, buffer: *mut u8) {
        let mut buffers = self.lock();
        if let Some(at) = buffers.iter().position(|it| it.address() == buffer.cast()) {
            std::mem::forget(buffers.remove(at));
        }
    }

    /// Called before the context in which the buffers are registered is reset. They stay mapped; no copy uses them.
    pub(crate) fn unregister(&self, driver: &Driver) {
        for buffer in self.lock().iter_mut().filter(|buffer| buffer.registered) {
            // SAFETY: registered by `prepare`.
            unsafe { (driver.cuMemHostUnregister)(buffer.address()) };
            buffer.registered = false;
        }
    }

    /// Whether all buffers can be read.
    #[cfg(test)]
    pub(crate) fn are_mapped(&self) -> bool {
        let mut resident = [0_u8; SIZE / 4096];
        // SAFETY: asks about the pages of one buffer, and writes one byte for each.
        let mapped = |it: &Buffer| unsafe { libc::mincore(it.address(), SIZE, resident.as_mut_ptr()) == 0 };
        let buffers = self.lock();
        !buffers.is_empty() && buffers.iter().all(mapped)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Buffer {
    /// Maps a buffer at this address, or elsewhere if the address is taken.
    fn map(wanted: u64) -> Option<Self> {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: without MAP_FIXED nothing is replaced.
        let place = unsafe { libc::mmap(wanted as *mut c_void, SIZE, protection, flags, -1, 0) };
        if place == libc::MAP_FAILED {
            return None;
        }
        // A fork would have this process write to other pages than the device. Huge pages, where the kernel has some, are
        // quicker to hash and to write from. The pages are populated last, so that they are of that kind.
        for advice in [libc::MADV_DONTFORK, libc::MADV_HUGEPAGE, libc::MADV_POPULATE_WRITE] {
            // SAFETY: what was just mapped.
            unsafe { libc::madvise(place, SIZE, advice) };
        }
        Some(Self { place: place as u64, registered: false })
    }

    fn address(&self) -> *mut c_void {
        self.place as *mut c_void
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // A buffer that the driver knows stays until the process ends.
        if !self.registered {
            // SAFETY: mapped by `map`; the engine that used it is gone with all of its lanes.
            unsafe { libc::munmap(self.address(), SIZE) };
        }
    }
}

//! Reads small amounts of device memory at once, independently of the program's streams.

use std::time::{Duration, Instant};

use rekindle_cuda_abi::types::*;
use tracing::warn;

use super::Engine;
use super::lane::POLL_INTERVAL;
use crate::gpu::driver::Driver;
use crate::resources::initial::{MOST, ReadDevice};

/// A copy of a few bytes takes some 10 us: for up to this long, spinning is better than sleeping.
const SPIN: Duration = Duration::from_micros(50);

impl Engine {
    /// Reads regions of a device's memory, given by address and length, of [`MOST`] bytes together. The function makes and maps
    /// nothing, so the driver places later code where it would have placed it anyway. The device's primary context must be
    /// current.
    ///
    /// The function waits only for its own copies, up to `limit`. Returns `None` if they are not done by then, as behind a
    /// hardware queue that is full of waiting work, or if the driver refuses; after a copy that was not done, nothing is read
    /// any more.
    ///
    /// # Safety
    /// The regions are mapped, and the device may read them.
    pub(crate) unsafe fn peek(
        &mut self,
        driver: &Driver,
        device: usize,
        regions: &[(u64, u64)],
        limit: Duration,
    ) -> Option<Vec<Vec<u8>>> {
        let total = regions.iter().try_fold(0_u64, |sum, (_, length)| sum.checked_add(*length))?;
        let lane = self.lanes.first().filter(|lane| self.peeks && total <= MOST && !lane.buffer.is_null())?;
        let (way, buffer) = (lane.ways.get(device).copied().flatten()?, lane.buffer);
        let mut at = 0;
        let enqueued = regions.iter().all(|&(address, length)| {
            // SAFETY: the regions fit into the buffer, one after the other; the rest is the caller's promise.
            let copied = unsafe {
                let host = buffer.add(at);
                (driver.cuMemcpyDtoHAsync_v2)(host.cast(), address, length as usize, way.stream)
            };
            at += length as usize;
            copied == CUDA_SUCCESS
        });
        let began = Instant::now();
        // SAFETY: the handles are ours, and their context is current.
        let mut done = unsafe { (driver.cuEventRecord)(way.done, way.stream) };
        while done == CUDA_SUCCESS {
            // SAFETY: as above.
            match unsafe { (driver.cuEventQuery)(way.done) } {
                CUDA_SUCCESS => break,
                CUDA_ERROR_NOT_READY if began.elapsed() < SPIN.min(limit) => std::hint::spin_loop(),
                CUDA_ERROR_NOT_READY if began.elapsed() < limit => std::thread::sleep(POLL_INTERVAL),
                error => done = error,
            }
        }
        if done != CUDA_SUCCESS {
            // The copies may still arrive, so the buffer is not used any more; `prepare` makes a lane in its place.
            warn!(
                result = result_name(done),
                "addresses of code cannot be read, and will not be compared in a restore"
            );
            self.peeks = false;
            self.lanes.remove(0);
            self.buffers.abandon(buffer);
            return None;
        }
        let mut at = 0;
        let read = regions.iter().map(|&(_, length)| {
            // SAFETY: as above, and the copies are done.
            let bytes = unsafe { std::slice::from_raw_parts(buffer.add(at), length as usize) };
            at += length as usize;
            bytes.to_vec()
        });
        let read = read.collect();
        enqueued.then_some(read)
    }
}

/// While the engine copies in the background, nothing is read.
impl ReadDevice for Option<Engine> {
    unsafe fn read_now(
        &mut self,
        driver: &Driver,
        device: usize,
        regions: &[(u64, u64)],
        limit: Duration,
    ) -> Option<Vec<Vec<u8>>> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.as_mut()?.peek(driver, device, regions, limit) }
    }
}

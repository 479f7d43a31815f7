//! Reads small amounts of device memory at once, independently of the program's streams.

use std::time::{Duration, Instant};

use rekindle_cuda_abi::types::*;
use tracing::warn;

use super::Engine;
use super::buffers::Buffers;
use super::lane::{POLL_INTERVAL, Way};
use crate::gpu::driver::{CallFailed, Driver, checked};
use crate::resources::initial::{MOST, ReadDevice};

/// A copy of a few bytes takes some 10 us: for up to this long, spinning is better than sleeping.
const SPIN: Duration = Duration::from_micros(50);

/// A buffer and streams of its own, so that it reads while the engine copies or loads, too.
pub(crate) struct Peek {
    buffers: Buffers,
    /// The buffer's number among those of lanes.
    number: usize,
    pub(super) buffer: *mut u8,
    ways: Vec<Option<Way>>,
    /// A copy into the buffer may still arrive.
    given_up: bool,
}

// SAFETY: the buffer is used by nothing else, and by one thread at a time.
unsafe impl Send for Peek {}

impl Peek {
    /// Reads through the buffer behind those of the engine's lanes.
    pub(crate) fn beside(engine: &Engine) -> Self {
        let (buffers, number) = (engine.buffers.clone(), engine.buffers_of_lanes());
        Self { buffers, number, buffer: std::ptr::null_mut(), ways: Vec::new(), given_up: false }
    }

    /// Makes the buffer, and missing streams. `primaries` are the devices' primary contexts.
    pub(crate) fn prepare(&mut self, driver: &Driver, primaries: &[CUcontext]) -> Result<(), CallFailed> {
        const NON_BLOCKING: u32 = 1;
        const DISABLE_TIMING: u32 = 2;
        let Some(&first) = primaries.first().filter(|_| !self.given_up) else { return Ok(()) };
        // SAFETY: the context is the driver's own.
        unsafe { checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(first))? };
        self.buffer = self.buffers.prepare(driver, self.number)?;
        self.ways.resize(primaries.len(), None);
        for (way, &primary) in self.ways.iter_mut().zip(primaries).filter(|(way, _)| way.is_none()) {
            let (mut stream, mut done) = (0, 0);
            // SAFETY: out parameters are locals; the context is the driver's own.
            unsafe {
                checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(primary))?;
                checked("cuStreamCreate", (driver.cuStreamCreate)(&raw mut stream, NON_BLOCKING))?;
                checked("cuEventCreate", (driver.cuEventCreate)(&raw mut done, DISABLE_TIMING))?;
            }
            *way = Some(Way { primary, stream, done });
        }
        Ok(())
    }

    /// Releases what it has in a device's primary context, which is about to be reset, but for the buffer's registration
    /// ([`Buffers::unregister`]). [`Peek::prepare`] makes it anew.
    pub(crate) fn release(&mut self, driver: &Driver, device: usize) {
        if let Some(way) = self.ways.get_mut(device).and_then(Option::take) {
            // SAFETY: the stream and the event are ours, and nobody waits for them.
            unsafe {
                (driver.cuEventDestroy_v2)(way.done);
                (driver.cuStreamDestroy_v2)(way.stream);
            }
        }
    }

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
        if self.given_up || total > MOST || self.buffer.is_null() {
            return None;
        }
        let (way, buffer) = (self.ways.get(device).copied().flatten()?, self.buffer);
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
            // The copies may still arrive, so the buffer is not used any more.
            warn!(
                result = result_name(done),
                "addresses of code cannot be read, and will not be compared in a restore"
            );
            self.given_up = true;
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

impl ReadDevice for Peek {
    unsafe fn read_now(
        &mut self,
        driver: &Driver,
        device: usize,
        regions: &[(u64, u64)],
        limit: Duration,
    ) -> Option<Vec<Vec<u8>>> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.peek(driver, device, regions, limit) }
    }
}

//! The command under way: the driver and session that execute it, and the objects that it names.

use rekindle_cuda_abi::types::*;
use rekindle_wire::ring::CommandHeader;

use crate::gpu::Gpu;
use crate::gpu::driver::{Driver, stream_is_busy};
use crate::session::Session;
use crate::session::outcome::Refused;
use crate::session::waiting::{StreamKey, Then};

/// The command under way, and the driver and session that execute it.
pub(crate) struct Call {
    pub(crate) gpu: Gpu,
    pub(crate) session: Session,
    /// The command's header. The command's parameters refer to the header's context and thread.
    pub(crate) header: CommandHeader,
}

impl Call {
    /// The driver.
    pub(crate) fn driver(&self) -> &'static Driver {
        self.gpu.driver
    }

    /// Makes the client's context the driver's current one; 0 leaves none.
    pub(crate) fn enter(&mut self, context: u64) -> Result<(), Refused> {
        self.session.enter(&mut self.gpu, context)
    }

    /// Makes the command's own context current again.
    pub(crate) fn enter_own(&mut self) -> Result<(), Refused> {
        self.enter(self.header.context)
    }

    /// The address of a chunk of the staging, which the driver knows from now on. `primary` is the first device's context: what is
    /// registered there stays when the client destroys the context in which it copies.
    pub(crate) fn staged(&mut self, chunk: usize, primary: CUcontext) -> Result<*mut u8, Refused> {
        let at = self.session.staging.chunk(chunk).ok_or(Refused::Code(CUDA_ERROR_INVALID_VALUE))?;
        if !self.session.staging.is_registered(chunk) {
            self.gpu.enter(primary).map_err(Refused::Code)?;
            let registered = self.session.staging.register(self.gpu.driver, chunk);
            self.enter_own()?;
            registered?;
        }
        Ok(at)
    }

    /// The context that what the command makes belongs to; a stream, however, belongs to the command's own context.
    pub(crate) fn owner(&self) -> u64 {
        self.session.owner(self.header.context)
    }

    /// The worker's number of the device that the command's context is on.
    pub(crate) fn device(&self) -> Result<usize, Refused> {
        self.session.device_of_context(self.header.context)
    }

    /// The stream that a parameter of the command names.
    pub(crate) fn stream_key(&self, handle: u64) -> Result<StreamKey, Refused> {
        self.session.stream_key(&self.header, handle)
    }

    /// The driver's handle of a stream in which the command is about to enqueue something.
    pub(crate) fn stream(&mut self, handle: u64) -> Result<CUstream, Refused> {
        let key = self.stream_key(handle)?;
        let (driver, objects) = (self.gpu.driver, &self.session.objects);
        let is_busy = |stream| stream_is_busy(driver, stream);
        let real = self.session.waiting.enqueue(key, is_busy, || match handle {
            CU_STREAM_LEGACY => Ok(CU_STREAM_LEGACY),
            CU_STREAM_PER_THREAD => {
                let mut stream = 0;
                // SAFETY: the out parameter is a local; the context is current.
                match unsafe { (driver.cuStreamCreate)(&raw mut stream, 0) } {
                    CUDA_SUCCESS => Ok(stream),
                    error => Err(error),
                }
            }
            handle => objects.get(handle).map(|o| o.real).ok_or(CUDA_ERROR_INVALID_HANDLE),
        });
        real.map_err(Refused::Code)
    }

    /// Waits for everything in these streams, then executes an action. Streams of other contexts are marked in their own
    /// contexts.
    pub(crate) fn when_done(&mut self, streams: Vec<StreamKey>, then: Then) -> Result<(), Refused> {
        let mut marks = Vec::with_capacity(streams.len());
        for key in streams {
            self.enter(key.context)?;
            marks.push(self.session.waiting.mark(self.gpu.driver, key).map_err(Refused::Code)?);
        }
        self.enter_own()?;
        self.session.waiting.add(marks, then);
        Ok(())
    }
}

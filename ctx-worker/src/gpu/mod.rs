//! The driver: its library loaded, its GPUs shown as several, its calls checked, its current context.

pub(crate) mod driver;
pub(crate) mod virtual_gpus;

use rekindle_cuda_abi::types::*;

use self::driver::Driver;

/// The driver, and the context that it has current in the thread of the worker's loop.
pub(crate) struct Gpu {
    pub(crate) driver: &'static Driver,
    current: CUcontext,
}

impl Gpu {
    /// A driver that has no context current in this thread.
    pub(crate) fn new(driver: &'static Driver) -> Self {
        Self { driver, current: 0 }
    }

    /// Makes one of the driver's contexts current; 0 leaves none.
    ///
    /// # Errors
    ///
    /// The driver's result, where it refuses the context.
    pub(crate) fn enter(&mut self, real: CUcontext) -> Result<(), CUresult> {
        if self.current != real {
            // SAFETY: 0, or a context that the driver gave.
            match unsafe { (self.driver.cuCtxSetCurrent)(real) } {
                CUDA_SUCCESS => self.current = real,
                error => return Err(error),
            }
        }
        Ok(())
    }

    /// Leaves this thread without a context: a call has changed or destroyed the current one.
    pub(crate) fn leave(&mut self) {
        // SAFETY: leaves the thread without a context.
        unsafe { (self.driver.cuCtxSetCurrent)(0) };
        self.current = 0;
    }
}

//! One lane of the engine: a pinned buffer, and how it copies on each device.

use std::time::Duration;

use rekindle_cuda_abi::types::*;

use crate::gpu::driver::{CallFailed, Driver, checked};
use crate::resources::job::Job;

/// How often a lane checks whether its copy is done. Between checks, other threads may use its core.
pub(super) const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// How a lane copies on a device.
#[derive(Clone, Copy)]
pub(super) struct Way {
    /// The device's primary context.
    pub(super) primary: CUcontext,
    /// The stream that all lanes share.
    pub(super) stream: CUstream,
    /// This lane's event, recorded behind its copy.
    pub(super) done: CUevent,
}

pub(super) struct Lane {
    pub(super) buffer: *mut u8,
    /// The lane's resources for each device.
    pub(super) ways: Vec<Option<Way>>,
}

// SAFETY: the buffer is this lane's alone, and a lane is used by one thread at a time.
unsafe impl Send for Lane {}

/// Makes a job's context current in this thread, and returns how to copy in it.
pub(super) fn enter(driver: &Driver, lane: &Lane, job: &Job) -> Result<Entered, CallFailed> {
    // SAFETY: the context is the driver's own.
    checked("cuCtxSetCurrent", unsafe { (driver.cuCtxSetCurrent)(job.context) })?;
    Ok(match lane.ways.get(job.device) {
        Some(Some(way)) if way.primary == job.context => Entered { stream: way.stream, done: Some(way.done) },
        // A context that the client created: the lane uses the thread's default stream in it.
        _ => Entered { stream: CU_STREAM_PER_THREAD, done: None },
    })
}

/// The stream in which a lane copies now, and the event that tells it of the end.
#[derive(Clone, Copy)]
pub(super) struct Entered {
    pub(super) stream: CUstream,
    done: Option<CUevent>,
}

/// Waits until all work that this thread enqueued is done, also if that fails.
pub(super) fn wait(driver: &Driver, way: Entered) -> Result<(), CallFailed> {
    // SAFETY: the handles are ours, and their context is current.
    let recorded = way.done.filter(|done| unsafe { (driver.cuEventRecord)(*done, way.stream) } == CUDA_SUCCESS);
    let Some(done) = recorded else {
        // SAFETY: as above.
        return checked("cuStreamSynchronize", unsafe { (driver.cuStreamSynchronize)(way.stream) });
    };
    loop {
        // SAFETY: as above.
        match unsafe { (driver.cuEventQuery)(done) } {
            CUDA_ERROR_NOT_READY => std::thread::sleep(POLL_INTERVAL),
            CUDA_SUCCESS => return Ok(()),
            error => {
                // SAFETY: as above. What still runs would read and write what is nobody's any more.
                unsafe { (driver.cuStreamSynchronize)(way.stream) };
                return checked("cuEventQuery", error);
            }
        }
    }
}

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
    /// The stream that all lanes share, or that of a [`super::Peek`].
    pub(super) stream: CUstream,
    /// The event that is recorded behind a copy.
    pub(super) done: CUevent,
}

pub(super) struct Lane {
    pub(super) buffer: *mut u8,
    /// The lane's resources for each device.
    pub(super) ways: Vec<Option<Way>>,
    /// While the engine loads.
    pub(super) halves: Halves,
}

/// The two halves of a lane's buffer: one is filled while the other is copied to a device.
#[derive(Default)]
pub(super) struct Halves {
    /// An event for each half, for each device.
    events: Vec<Option<[CUevent; 2]>>,
    /// The events behind the last copies out of each half.
    copying: [Option<CUevent>; 2],
}

impl Lane {
    /// Makes the events of the halves.
    pub(super) fn make_halves(&mut self, driver: &Driver) -> Result<(), CallFailed> {
        for way in &self.ways {
            let events = way.map(|way| Ok([way.make_event(driver)?, way.make_event(driver)?])).transpose()?;
            self.halves.events.push(events);
        }
        Ok(())
    }

    /// Removes the events of the halves. All copies are done.
    pub(super) fn remove_halves(&mut self, driver: &Driver) {
        for event in std::mem::take(&mut self.halves).events.into_iter().flatten().flatten() {
            // SAFETY: the event is ours, and nobody waits for it.
            unsafe { (driver.cuEventDestroy_v2)(event) };
        }
    }

    /// Whether copies to this device can use the halves.
    pub(super) fn has_halves(&self, device: usize) -> bool {
        matches!(self.halves.events.get(device), Some(Some(_)))
    }

    /// Waits until no copy reads a half any more.
    pub(super) fn settle(&mut self, driver: &Driver, half: usize) -> Result<(), CallFailed> {
        match self.halves.copying[half].take() {
            Some(event) => wait_for(driver, event),
            None => Ok(()),
        }
    }

    /// Called when a copy out of a half has been enqueued in the device's stream, whose context is current.
    pub(super) fn begun(&mut self, driver: &Driver, half: usize, device: usize) -> Result<(), CallFailed> {
        let (Some(Some(events)), Some(Some(way))) = (self.halves.events.get(device), self.ways.get(device)) else {
            return Err(CallFailed { call: "cuEventRecord", code: CUDA_ERROR_INVALID_HANDLE });
        };
        let event = events[half];
        // SAFETY: the handles are ours.
        checked("cuEventRecord", unsafe { (driver.cuEventRecord)(event, way.stream) })?;
        self.halves.copying[half] = Some(event);
        Ok(())
    }
}

impl Way {
    /// Makes an event in the device's primary context.
    pub(super) fn make_event(&self, driver: &Driver) -> Result<CUevent, CallFailed> {
        const DISABLE_TIMING: u32 = 2;
        let mut event = 0;
        // SAFETY: the out parameter is a local; the context is the driver's own.
        unsafe {
            checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(self.primary))?;
            checked("cuEventCreate", (driver.cuEventCreate)(&raw mut event, DISABLE_TIMING))?;
        }
        Ok(event)
    }
}

/// Waits for an event, whose handle is ours.
fn wait_for(driver: &Driver, event: CUevent) -> Result<(), CallFailed> {
    loop {
        // SAFETY: the event is ours, as callers promise.
        match unsafe { (driver.cuEventQuery)(event) } {
            CUDA_ERROR_NOT_READY => std::thread::sleep(POLL_INTERVAL),
            code => return checked("cuEventQuery", code),
        }
    }
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

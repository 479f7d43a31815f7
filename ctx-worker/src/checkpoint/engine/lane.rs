//! One lane of the engine: its pinned buffers, and how it copies on each device.

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
    /// The second buffer of a lane that loads.
    pub(super) second: *mut u8,
    /// The lane's resources for each device.
    pub(super) ways: Vec<Option<Way>>,
    /// While the engine loads.
    pub(super) turns: Turns,
}

/// The two buffers of a lane that loads take turns: one is filled while the other is copied to a device.
#[derive(Default)]
pub(super) struct Turns {
    /// An event for each buffer, for each device.
    events: Vec<Option<[CUevent; 2]>>,
    /// The events behind the last copies out of each buffer.
    copying: [Option<CUevent>; 2],
    /// The buffer whose turn it was last.
    last: usize,
}

impl Lane {
    /// A lane without buffers.
    pub(super) fn new(devices: usize) -> Self {
        let none = std::ptr::null_mut();
        Self { buffer: none, second: none, ways: vec![None; devices], turns: Turns::default() }
    }

    /// Makes the events of the buffers.
    pub(super) fn make_events(&mut self, driver: &Driver) -> Result<(), CallFailed> {
        for way in &self.ways {
            let events = way.map(|way| Ok([way.make_event(driver)?, way.make_event(driver)?])).transpose()?;
            self.turns.events.push(events);
        }
        Ok(())
    }

    /// Removes the events of the buffers. All copies are done.
    pub(super) fn remove_events(&mut self, driver: &Driver) {
        for event in std::mem::take(&mut self.turns).events.into_iter().flatten().flatten() {
            // SAFETY: the event is ours, and nobody waits for it.
            unsafe { (driver.cuEventDestroy_v2)(event) };
        }
    }

    /// Whether copies to this device can use both buffers.
    pub(super) fn has_events(&self, device: usize) -> bool {
        matches!(self.turns.events.get(device), Some(Some(_))) && !self.second.is_null()
    }

    /// The buffer whose turn it is. No copy reads it any more.
    pub(super) fn take_turn(&mut self, driver: &Driver) -> Result<*mut u8, CallFailed> {
        self.turns.last = 1 - self.turns.last;
        self.turns.settle(driver, self.turns.last)?;
        Ok([self.buffer, self.second][self.turns.last])
    }

    /// Called when a copy out of the buffer whose turn it is has been enqueued in the device's stream, whose context is current.
    pub(super) fn begun(&mut self, driver: &Driver, device: usize) -> Result<(), CallFailed> {
        let (Some(Some(events)), Some(Some(way))) = (self.turns.events.get(device), self.ways.get(device)) else {
            return Err(CallFailed { call: "cuEventRecord", code: CUDA_ERROR_INVALID_HANDLE });
        };
        let event = events[self.turns.last];
        // SAFETY: the handles are ours.
        checked("cuEventRecord", unsafe { (driver.cuEventRecord)(event, way.stream) })?;
        self.turns.copying[self.turns.last] = Some(event);
        Ok(())
    }

    /// Waits until no copy reads either buffer any more.
    pub(super) fn settle(&mut self, driver: &Driver) -> Result<(), CallFailed> {
        self.turns.settle(driver, 0)?;
        self.turns.settle(driver, 1)
    }
}

impl Turns {
    fn settle(&mut self, driver: &Driver, buffer: usize) -> Result<(), CallFailed> {
        match self.copying[buffer].take() {
            Some(event) => wait_for(driver, event),
            None => Ok(()),
        }
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

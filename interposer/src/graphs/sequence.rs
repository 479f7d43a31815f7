//! Executable graphs that are enqueued step by step: one after the other in the stream that they are launched in.
//!
//! Copies to memory that only this process reaches happen when the stream comes to them: the callback thread copies from
//! pinned memory of the graph. A copy to the device takes its bytes from such memory when the graph is launched, before all
//! steps, as driver 580 does.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use rekindle_cuda_abi::launch::extra;
use rekindle_cuda_abi::types::*;
use rekindle_graphs::{Copy, Flat, Result, Step, Task};
use rekindle_wire::command::{HOST_FUNCTION, Launch};

use super::program;
use crate::call::remote;
use crate::operations::host_box::{self, HostBox};
use crate::operations::launch::{Origin, launch as launch_kernel};
use crate::operations::{boxes, callback, event, fill, pinned, words};
use crate::process::calling_thread::named_stream;
use crate::state::client;
use crate::state::contexts::within;

/// An executable graph.
struct Sequence {
    /// Recorded behind each launch, since launches of one graph do not overlap.
    event: CUevent,
    launched: bool,
    /// Whether a launch has enqueued steps without the event behind them: then jobs of the callback thread are never freed.
    lost: bool,
    bounces: HashMap<usize, Bounce>,
    /// Buffers of copies that were replaced, which a launch may still be using.
    former: Vec<Bounce>,
}

/// A copy within the host's memory, or to such of it that only this process reaches, and the pinned memory that it goes
/// through.
struct Bounce {
    copy: Copy,
    pinned: *mut c_void,
    /// The job of the callback thread. It lives as long as the graph.
    job: *mut Job,
    /// Whether the source, and whether the destination, is memory that only this process reaches.
    before: bool,
    after: bool,
}

/// The bytes that a copy to the device has taken from memory that only this process reaches.
struct Taken {
    /// The copy, from `bytes`.
    copy: Copy,
    bytes: Vec<u8>,
}

impl Taken {
    /// Takes the bytes now, if the step is such a copy.
    fn now(step: &Step) -> Result<Option<Self>> {
        let Task::Copy(Copy { copy: c, context }) = &step.task else { return Ok(None) };
        let Some(from) = boxes::host_box(&c.src, c)?.filter(|_| boxes::is_on_device(&c.dst, c)) else {
            return Ok(None);
        };
        let size =
            c.width.checked_mul(c.height).and_then(|n| n.checked_mul(c.depth)).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(size).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        bytes.resize(size, 0);
        let to = HostBox { address: bytes.as_mut_ptr() as usize, pitch: c.width, rows: c.height };
        // SAFETY: as many bytes as the copy has; the application has promised that its memory is there when its graph is
        // launched.
        unsafe { host_box::within_host(to, from, [c.width, c.height, c.depth].map(|n| n as u64)) };
        let src = CudaMemcpy3dSide {
            kind: CU_MEMORYTYPE_HOST,
            host: bytes.as_ptr() as u64,
            pitch: c.width,
            height: c.height,
            ..Default::default()
        };
        Ok(Some(Self { copy: Copy { copy: CudaMemcpy3d { src, ..*c }, context: *context }, bytes }))
    }

    /// Enqueues the copy, which takes the bytes once more.
    fn enqueue(&self, stream: CUstream) -> Result<()> {
        debug_assert_eq!(self.copy.copy.src.host, self.bytes.as_ptr() as u64);
        // SAFETY: the bytes are there.
        within(self.copy.context, || unsafe { boxes::copy(&self.copy.copy, stream, false) })
    }
}

// SAFETY: the pointers are to memory of the bounce's own.
unsafe impl Send for Bounce {}

/// A copy that the callback thread makes.
struct Job {
    to: HostBox,
    from: HostBox,
    size: [u64; 3],
}

/// All executable graphs of this kind, by handle.
type Sequences = HashMap<u64, Arc<Mutex<Sequence>>>;

static SEQUENCES: Mutex<Option<Sequences>> = Mutex::new(None);

fn all() -> Result<MutexGuard<'static, Option<Sequences>>> {
    SEQUENCES.lock().map_err(|_| CUDA_ERROR_UNKNOWN)
}

fn get(exec: u64) -> Result<Arc<Mutex<Sequence>>> {
    all()?.as_ref().and_then(|map| map.get(&exec).cloned()).ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// Prepares an executable graph.
pub(super) fn create(flat: &Flat) -> Result<u64> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    const DISABLE_TIMING: u32 = 2;
    let mut event = 0;
    // SAFETY: the out parameter is a local.
    check(unsafe { remote::cuEventCreate(&raw mut event, DISABLE_TIMING) })?;
    let mut sequence = Sequence { event, launched: false, lost: false, bounces: HashMap::new(), former: Vec::new() };
    if let Err(error) = sequence.prepare(flat) {
        sequence.end();
        return Err(error);
    }
    let exec = NEXT.fetch_add(1, Relaxed);
    all()?.get_or_insert_default().insert(exec, Arc::new(Mutex::new(sequence)));
    Ok(exec)
}

/// Replaces steps of an executable graph.
pub(super) fn update(exec: u64, flat: &Flat) -> Result<()> {
    get(exec)?.lock().map_err(|_| CUDA_ERROR_UNKNOWN)?.prepare(flat)
}

/// Destroys an executable graph.
pub(super) fn destroy(exec: u64) {
    let gone = all().ok().and_then(|mut map| map.as_mut()?.remove(&exec));
    if let Some(mut sequence) = gone.as_ref().and_then(|s| s.lock().ok()) {
        sequence.end();
    }
}

/// Enqueues the steps of an executable graph.
pub(super) fn launch(exec: u64, flat: &Flat, stream: CUstream) -> Result<()> {
    let stream = named_stream(stream);
    let sequence = get(exec)?;
    // One launch at a time: the steps of two must not mix.
    let mut sequence = sequence.lock().map_err(|_| CUDA_ERROR_UNKNOWN)?;
    let steps = || flat.steps.iter().enumerate().filter(|(_, step)| step.enabled);
    let taken = steps().map(|(_, step)| Taken::now(step)).collect::<Result<Vec<_>>>()?;
    if sequence.launched {
        // SAFETY: no pointers.
        check(unsafe { remote::cuStreamWaitEvent(stream, sequence.event, 0) })?;
    }
    let performed = steps().zip(taken).try_for_each(|((place, step), taken)| match taken {
        Some(taken) => taken.enqueue(stream),
        None => sequence.perform(place, step, stream),
    });
    sequence.launched = true;
    // Behind what was enqueued, all of it or not.
    // SAFETY: no pointers.
    let recorded = check(unsafe { remote::cuEventRecord(sequence.event, stream) });
    sequence.lost |= recorded.is_err();
    performed.and(recorded)
}

impl Sequence {
    /// Makes pinned memory for copies that need it.
    fn prepare(&mut self, flat: &Flat) -> Result<()> {
        for (place, step) in flat.steps.iter().enumerate() {
            let Task::Copy(copy) = &step.task else { continue };
            let needs = boxes::ends(&copy.copy)?.is_none();
            if !needs || self.bounces.get(&place).is_some_and(|b| b.copy == *copy) {
                continue;
            }
            let c = &copy.copy;
            let (to, from) = (boxes::host_box(&c.dst, c)?, boxes::host_box(&c.src, c)?);
            if boxes::is_on_device(&c.dst, c) {
                continue;
            }
            let bytes = [copy.copy.width, copy.copy.height, copy.copy.depth]
                .iter()
                .try_fold(1_usize, |product, n| product.checked_mul(*n));
            let bytes = bytes.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
            let pinned = pinned::allocate(client::get()?, bytes as u64, 0)? as *mut c_void;
            let packed = HostBox { address: pinned as usize, pitch: c.width, rows: c.height };
            let size = [c.width, c.height, c.depth].map(|n| n as u64);
            let job = Job { to: to.unwrap_or(packed), from: from.unwrap_or(packed), size };
            let (before, after) = (from.is_some(), to.is_some());
            let job = Box::into_raw(Box::new(job));
            self.former.extend(self.bounces.insert(place, Bounce { copy: *copy, pinned, job, before, after }));
        }
        if !self.former.is_empty() && self.is_idle() {
            self.former.drain(..).for_each(Bounce::free);
        }
        Ok(())
    }

    /// Whether no launch is under way.
    fn is_idle(&self) -> bool {
        // SAFETY: no pointers.
        !self.lost && (!self.launched || unsafe { remote::cuEventQuery(self.event) } == CUDA_SUCCESS)
    }

    fn perform(&mut self, place: usize, step: &Step, stream: CUstream) -> Result<()> {
        match &step.task {
            Task::Kernel(kernel) => {
                let what = Launch {
                    function: kernel.function,
                    grid: kernel.grid,
                    block: kernel.block,
                    shared_bytes: kernel.shared_bytes,
                    flags: 0,
                    stream,
                    attributes: &program::attributes(kernel),
                    parameters: &kernel.parameters,
                };
                within(kernel.context, || launch_gathered(what))
            }
            Task::Copy(copy) => match self.bounces.get(&place) {
                Some(bounce) if boxes::ends(&copy.copy)?.is_none() => match bounce.copy == *copy {
                    true => bounce.enqueue(stream),
                    // The buffer is of a change that failed.
                    false => Err(CUDA_ERROR_INVALID_VALUE),
                },
                // SAFETY: no memory that only this process reaches.
                _ => within(copy.context, || unsafe { boxes::copy(&copy.copy, stream, false) }),
            },
            Task::Fill(node) => within(node.context, || fill::of_node(&node.fill, stream)),
            Task::Host(host) => {
                callback::enqueue(stream, host.function as *mut c_void, host.data as *mut c_void, HOST_FUNCTION)
            }
            Task::Wait(event) => event::wait_in_stream(*event, stream, 0),
            Task::Record(event) => event::record(*event, stream, 0),
            Task::Words(list) => {
                let list: Vec<_> = list.operations.iter().map(words::operation).collect();
                words::enqueue(stream, &list)
            }
            // No sequence is made of a graph with conditional nodes.
            Task::Conditional(_) => Err(CUDA_ERROR_NOT_SUPPORTED),
            Task::Child(_) | Task::Empty | Task::Allocate(_) | Task::Free(_) => Ok(()),
        }
    }

    /// Frees everything. If the last launch is still under way, the callback thread may use its jobs, so they stay.
    fn end(&mut self) {
        if self.is_idle() {
            let bounces = self.bounces.drain().map(|(_, bounce)| bounce);
            bounces.chain(self.former.drain(..)).for_each(Bounce::free);
        }
        // SAFETY: no pointers.
        unsafe { remote::cuEventDestroy_v2(self.event) };
    }
}

/// Launches a kernel whose parameters have been gathered.
fn launch_gathered(what: Launch<'_>) -> Result<()> {
    let mut size = 0;
    let mut extra = extra(what.parameters, &mut size);
    // SAFETY: parameters of the function's layout, which live through the call.
    unsafe {
        launch_kernel(Launch { parameters: &[], ..what }, std::ptr::null_mut(), extra.as_mut_ptr(), Origin::Parts)
    }
}

/// The function that the callback thread calls.
unsafe extern "C" fn run(job: *mut c_void) {
    // SAFETY: a job of a bounce, which lives as long as its graph.
    let job = unsafe { &*job.cast::<Job>() };
    // SAFETY: the application's memory is there when its graph is launched, as it has promised.
    unsafe { host_box::within_host(job.to, job.from, job.size) };
}

impl Bounce {
    /// Frees a buffer that no launch uses any more.
    fn free(self) {
        // SAFETY: made by a box, which nobody else has.
        drop(unsafe { Box::from_raw(self.job) });
        // Freed with the process if this fails.
        let _ = client::get().and_then(|client| pinned::free(client, self.pinned as u64));
    }

    fn enqueue(&self, stream: CUstream) -> Result<()> {
        let c = &self.copy.copy;
        let pinned = CudaMemcpy3dSide {
            kind: CU_MEMORYTYPE_HOST,
            host: self.pinned as u64,
            pitch: c.width,
            height: c.height,
            ..Default::default()
        };
        let call = || callback::enqueue(stream, run as *mut c_void, self.job.cast(), HOST_FUNCTION);
        // SAFETY: pinned memory of this bounce's, and what the worker reaches.
        let copy = |copy: &CudaMemcpy3d| within(self.copy.context, || unsafe { boxes::copy(copy, stream, false) });
        match (self.before, self.after) {
            (true, true) => call(),
            (true, false) => call().and_then(|()| copy(&CudaMemcpy3d { src: pinned, ..*c })),
            (false, _) => copy(&CudaMemcpy3d { dst: pinned, ..*c }).and_then(|()| call()),
        }
    }
}

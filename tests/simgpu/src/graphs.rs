//! Graphs: `rekindle-graphs` keeps them, and a launch runs a graph's steps one after the other in its stream.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::types::*;
use rekindle_graphs::{Copy, Driver, Fill, Flat, Kernel, KernelFacts, Role, Stream as Named, StreamKey, Words};

use crate::copy::{self, Side};
use crate::device::devices;
use crate::event::Event;
use crate::execution::launch::check;
use crate::graph_parts::{shape, sides};
use crate::graph_steps as steps;
use crate::handles;
use crate::library::{Code, code, function_in};
use crate::memory::space::{self, Kind};
use crate::order::{self, Mark};
use crate::status::Result;
use crate::word::words_are_good;
use crate::{current, device};

/// The services that [`rekindle_graphs`] needs.
struct Software;

/// Makes this library execute its graphs.
pub(crate) fn register() {
    rekindle_graphs::register(&Software);
}

/// The moment when the last launch of each executable graph is done: launches of one graph do not overlap.
static LAUNCHED: Mutex<Option<HashMap<u64, Mark>>> = Mutex::new(None);

fn launched() -> MutexGuard<'static, Option<HashMap<u64, Mark>>> {
    LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Driver for Software {
    fn current(&self) -> Result<CUcontext> {
        let handle = current::handle();
        if handle != 0 {
            current::healthy()?;
        }
        Ok(handle)
    }

    fn stream(&self, stream: CUstream) -> Result<Named> {
        let stream = current::stream(stream)?;
        let role = match stream.role() {
            order::Role::Legacy => Role::Legacy,
            order::Role::Blocking => Role::Blocking,
            order::Role::NonBlocking => Role::Free,
        };
        // A stream's id is its own, the threads' default streams included.
        let key = StreamKey { context: stream.home()?, handle: stream.id, thread: 0 };
        Ok(Named { key, role, priority: stream.priority })
    }

    fn event(&self, event: CUevent) -> Result<CUcontext> {
        let event = handles::get::<Event>(event)?;
        Ok(event.context.upgrade().ok_or(CUDA_ERROR_INVALID_HANDLE)?.handle)
    }

    fn kernel(&self, function: u64) -> Result<KernelFacts> {
        let (declared, context) = match code(function)? {
            Code::Function(f) => (f.kernel.clone(), f.context.upgrade().map_or(0, |c| c.handle)),
            Code::Kernel(k) => (k.declared.clone(), 0),
        };
        let layout = declared.params.iter().map(|p| (p.offset, p.size)).collect();
        Ok(KernelFacts { name: declared.name.clone(), layout, context })
    }

    fn check_kernel(&self, kernel: &Kernel) -> Result<()> {
        let context = current::named(kernel.context)?;
        check(&*function_in(&context, kernel.function)?, &shape(kernel)?)
    }

    fn check_copy(&self, copy: &Copy) -> Result<()> {
        let context = current::named(copy.context)?;
        let ([dst, src], size) = sides(&copy.copy)?;
        copy::check(&context, dst, src, size)
    }

    fn check_fill(&self, fill: &Fill) -> Result<()> {
        let context = current::named(fill.context)?;
        let p = &fill.fill;
        let bytes = p.width.checked_mul(p.element as usize).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let side = Side { pitch: p.pitch, ..Side::device(p.dst) };
        copy::check_fill(&context, side, [bytes, p.height])
    }

    fn check_words(&self, words: &Words) -> Result<()> {
        words_are_good(&*current::named(words.context)?, &words.operations)
    }

    fn allocate(&self, device: CUdevice, bytes: usize) -> Result<CUdeviceptr> {
        let device = device::device(device)?;
        device.allocate(0, Kind::Device, bytes as u64)
    }

    fn release(&self, address: CUdeviceptr) {
        // Commands that were submitted before may use the graph's memory.
        if let Ok(context) = current::current() {
            let _ = context.synchronize();
        }
        if let Some(region) = space::remove(address, |r| r.kind == Kind::Device)
            && let Some(device) = devices().get(region.device)
        {
            device.reclaim(&region);
        }
    }

    fn device(&self, context: CUcontext) -> Result<CUdevice> {
        Ok(current::named(context)?.device.ordinal as CUdevice)
    }

    fn is_device(&self, device: CUdevice) -> Result<()> {
        device::device(device).map(drop)
    }

    fn instantiate(&self, _flat: &Flat, _flags: u64) -> Result<u64> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Ok(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    fn update(&self, _exec: u64, _flat: &Flat, _changed: &[usize]) -> Result<()> {
        Ok(())
    }

    fn launch(&self, exec: u64, flat: &Flat, stream: CUstream) -> Result<()> {
        let stream = current::stream(stream)?;
        stream.context()?.check()?;
        let before = launched().get_or_insert_default().get(&exec).cloned();
        if let Some(mark) = before.filter(|m| !m.reached()) {
            stream.hold(mark)?;
        }
        steps::launch(flat, &stream)?;
        launched().get_or_insert_default().insert(exec, stream.last());
        Ok(())
    }

    fn upload(&self, _exec: u64, stream: CUstream) -> Result<()> {
        current::stream(stream)?.context()?.check()
    }

    fn destroy(&self, exec: u64) {
        launched().get_or_insert_default().remove(&exec);
    }
}

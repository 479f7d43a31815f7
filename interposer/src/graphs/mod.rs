//! Graphs. `rekindle-graphs` keeps them in this process. The worker has an executable graph as a graph of the driver, or this
//! process enqueues it step by step.
//!
//! ```text
//!   kernels, copies that the worker reaches, memsets   ── program ──> worker: one command a launch
//!   with host functions, events, words, pageable memory ── each launch: the steps in the stream, in their order
//! ```
//!
//! Memory of allocation nodes is allocated when the node is made, and stays: alloc and free nodes are for this process.

mod checks;
mod program;
mod sequence;

use rekindle_cuda_abi::types::*;
use rekindle_graphs::{Copy, Driver, Fill, Flat, Kernel, KernelFacts, Result, Role, Stream, StreamKey, Task, Words};
use rekindle_wire::codec::Writer;
use rekindle_wire::command::{
    GRAPH_CREATE, GRAPH_DESTROY, GRAPH_LAUNCH, GRAPH_SET, GRAPH_UPLOAD, GraphCreate, GraphDestroy, GraphInStream,
    GraphSet, Kind, MEM_FREE, MemFree,
};
use rekindle_wire::graph::Program;

use crate::call::{Call, standing_error, stream_of};
use crate::connection::prints;
use crate::operations::{boxes, code, device_memory, stream as streams, words};
use crate::process::calling_thread::{self, named_stream};
use crate::process::log;
use crate::state::client;
use crate::state::contexts::{self, Contexts};

/// This process, as [`rekindle_graphs`] uses it.
struct Process;

/// Lets `rekindle-graphs` launch this process's graphs.
pub(crate) fn register() {
    rekindle_graphs::register(&Process);
}

impl Driver for Process {
    fn current(&self) -> Result<CUcontext> {
        if calling_thread::in_callback() {
            return Err(CUDA_ERROR_NOT_PERMITTED);
        }
        standing_error(client::get()?)?;
        Ok(contexts::current())
    }

    fn stream(&self, stream: CUstream) -> Result<Stream> {
        const NON_BLOCKING: u32 = 1;
        let handle = named_stream(stream);
        let known = streams::named(handle)?;
        if known.context == 0 {
            return Err(CUDA_ERROR_INVALID_CONTEXT);
        }
        let thread = if handle == CU_STREAM_PER_THREAD { u64::from(calling_thread::number()) } else { 0 };
        let role = match handle {
            CU_STREAM_LEGACY => Role::Legacy,
            _ if known.flags & NON_BLOCKING != 0 => Role::Free,
            _ => Role::Blocking,
        };
        let key = StreamKey { context: known.context, handle, thread };
        Ok(Stream { key, role, priority: known.priority })
    }

    fn event(&self, event: CUevent) -> Result<CUcontext> {
        client::get()?.events.context(event).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    fn kernel(&self, function: u64) -> Result<KernelFacts> {
        let known = client::get()?.functions.get(function).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        let name = known.name.to_string_lossy().into_owned();
        Ok(KernelFacts { name, layout: known.params.clone(), context: known.context })
    }

    fn check_kernel(&self, kernel: &Kernel) -> Result<()> {
        checks::check_kernel(kernel)
    }

    fn check_copy(&self, copy: &Copy) -> Result<()> {
        boxes::ends(&copy.copy).map(drop)
    }

    fn check_fill(&self, fill: &Fill) -> Result<()> {
        let p = &fill.fill;
        let row = (p.width as u64).checked_mul(u64::from(p.element));
        let rows = (p.height as u64).saturating_sub(1).checked_mul(p.pitch as u64);
        let bytes = row.zip(rows).and_then(|(row, rows)| rows.checked_add(row)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let aligned = p.dst.is_multiple_of(u64::from(p.element));
        if aligned && client::get()?.memory.is_direct(p.dst, bytes) { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    }

    fn check_words(&self, list: &Words) -> Result<()> {
        list.operations.iter().map(words::operation).try_for_each(|operation| words::check_operation(&operation))
    }

    fn allocate(&self, device: CUdevice, bytes: usize) -> Result<CUdeviceptr> {
        let client = client::get()?;
        let device = client.devices.number(device)?;
        let (current, known) = client.contexts.current()?;
        let context = if known.device == device { current } else { Contexts::primary_handle(device) };
        client.contexts.get(context).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        device_memory::allocate(client, (context, device), bytes as u64, |number| {
            Ok(Call::unchecked(client, number, context))
        })
    }

    fn release(&self, address: CUdeviceptr) {
        if let Ok(client) = client::get()
            && client.memory.remove(address).is_some()
        {
            let mut call = Call::unchecked(client, MEM_FREE, contexts::current());
            call.put(&MemFree { address });
            call.send();
        }
    }

    fn device(&self, context: CUcontext) -> Result<CUdevice> {
        let client = client::get()?;
        Ok(client.devices.ordinal(client.contexts.get(context).ok_or(CUDA_ERROR_INVALID_CONTEXT)?.device))
    }

    fn is_device(&self, device: CUdevice) -> Result<()> {
        client::get()?.devices.number(device).map(drop)
    }

    fn instantiate(&self, flat: &Flat, flags: u64) -> Result<u64> {
        let Some(steps) = program::steps(flat)? else {
            if flat.steps.iter().any(|step| matches!(step.task, Task::Conditional(_))) {
                // A condition lives in one graph of the driver's, which cannot be left for what this process does.
                log::refused(
                    "conditional nodes beside functions of the host, events, words or memory that is not pinned",
                );
                return Err(CUDA_ERROR_NOT_SUPPORTED);
            }
            return sequence::create(flat);
        };
        let image = code::send_parts(&[&Program { steps }.to_bytes()])?;
        let mut call = Call::in_context(GRAPH_CREATE)?;
        let exec = client::get()?.fresh(Kind::GraphExec);
        call.put(&GraphCreate { exec, image, flags });
        check(call.wait().0)?;
        Ok(exec)
    }

    fn update(&self, exec: u64, flat: &Flat, changed: &[usize]) -> Result<()> {
        if !Kind::GraphExec.owns(exec) {
            return sequence::update(exec, flat);
        }
        let mut steps = Vec::with_capacity(changed.len());
        for place in changed {
            let step = flat.steps.get(*place).ok_or(CUDA_ERROR_INVALID_VALUE)?;
            // A change cannot make the worker unable to do the copy.
            steps.push((*place, program::step(step)?.ok_or(CUDA_ERROR_INVALID_VALUE)?));
        }
        for (place, step) in steps {
            let mut words = Writer::new();
            step.write(&mut words);
            let mut call = Call::new(GRAPH_SET)?;
            call.put(&GraphSet { exec, place: place as u64, step: words.bytes() });
            check(call.send())?;
        }
        Ok(())
    }

    fn launch(&self, exec: u64, flat: &Flat, stream: CUstream) -> Result<()> {
        prints::deliver(&client::get()?.connection);
        if Kind::GraphExec.owns(exec) {
            command(GRAPH_LAUNCH, exec, stream)
        } else {
            sequence::launch(exec, flat, stream)
        }
    }

    fn upload(&self, exec: u64, stream: CUstream) -> Result<()> {
        if Kind::GraphExec.owns(exec) { command(GRAPH_UPLOAD, exec, stream) } else { Ok(()) }
    }

    fn destroy(&self, exec: u64) {
        if !Kind::GraphExec.owns(exec) {
            return sequence::destroy(exec);
        }
        if let Ok(client) = client::get() {
            let mut call = Call::unchecked(client, GRAPH_DESTROY, contexts::current());
            call.put(&GraphDestroy { exec });
            call.send();
        }
    }
}

/// A command about an executable graph in a stream.
fn command(call: u16, exec: u64, stream: CUstream) -> Result<()> {
    let mut call = Call::in_context(call)?;
    call.put(&GraphInStream { exec, stream: stream_of(stream)? });
    check(call.send())
}

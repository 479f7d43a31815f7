//! Executable graphs as programs for the worker.

use rekindle_cuda_abi::types::*;
use rekindle_graphs::{Flat, Kernel, Result, Step as Planned, Task as Planning};
use rekindle_wire::codec::Writer;
use rekindle_wire::command::Launch;
use rekindle_wire::graph::{Conditional, MAX_STEPS, Step, Task};

use crate::operations::boxes;

/// A program's steps; `None` where the worker cannot do them all by itself.
pub(super) fn steps(flat: &Flat) -> Result<Option<Vec<Step>>> {
    if flat.steps.len() > MAX_STEPS {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    flat.steps.iter().map(step).collect()
}

/// One step, as [`steps`].
pub(super) fn step(planned: &Planned) -> Result<Option<Step>> {
    let (context, task) = match &planned.task {
        Planning::Kernel(kernel) => (kernel.context, Task::Kernel(launch(kernel))),
        Planning::Copy(copy) => {
            let Some((target, source)) = boxes::ends(&copy.copy)? else { return Ok(None) };
            let size = [copy.copy.width, copy.copy.height, copy.copy.depth].map(|n| n as u64);
            (copy.context, Task::Copy { target, source, size })
        }
        Planning::Fill(fill) => {
            let CudaMemsetNodeParams { dst, pitch, value, element, width, height } = fill.fill;
            let (pitch, width, height) = (pitch as u64, width as u64, height as u64);
            (fill.context, Task::Fill { address: dst, pitch, value, element, width, height })
        }
        Planning::Child(_) | Planning::Empty | Planning::Allocate(_) | Planning::Free(_) => (0, Task::Nothing),
        Planning::Conditional(it) => {
            let bodies = it.bodies.len() as u32;
            let rekindle_graphs::Conditional { handle, kind, default, assigns, .. } = *it;
            (it.context, Task::Conditional(Conditional { handle, kind, bodies, default, assigns }))
        }
        Planning::Host(_) | Planning::Wait(_) | Planning::Record(_) | Planning::Words(_) => return Ok(None),
    };
    let edge = |(place, data): &(usize, CUgraphEdgeData)| {
        let [a, b, c, d, e] = data.reserved;
        (*place as u32, [data.from_port, data.to_port, data.kind, a, b, c, d, e])
    };
    let within = planned.within.map(|(place, body)| (place as u32, body as u32));
    Ok(Some(Step { enabled: planned.enabled, context, after: planned.after.iter().map(edge).collect(), within, task }))
}

/// A kernel's launch attributes as they travel.
pub(super) fn attributes(kernel: &Kernel) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (id, value) in &kernel.attributes {
        bytes.extend_from_slice(&u64::from(*id).to_le_bytes());
        value.0.iter().for_each(|v| bytes.extend_from_slice(&v.to_le_bytes()));
    }
    bytes
}

fn launch(kernel: &Kernel) -> Vec<u8> {
    let mut words = Writer::new();
    let launch = Launch {
        function: kernel.function,
        grid: kernel.grid,
        block: kernel.block,
        shared_bytes: kernel.shared_bytes,
        flags: 0,
        stream: 0,
        attributes: &attributes(kernel),
        parameters: &kernel.parameters,
    };
    launch.write(&mut words);
    words.into_bytes()
}

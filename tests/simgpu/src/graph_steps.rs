//! The steps of a launch of a graph: one after the other in the stream of the launch. When the stream comes to a conditional step,
//! that runs the steps of a body, as often as its condition says, in a stream of its own.

use std::ffi::c_void;
use std::sync::Arc;

use rekindle_cuda_abi::launch::extra;
use rekindle_graphs::{Conditional, Flat, Step, Task, Values};

use crate::context::Context;
use crate::copy::{self, Side};
use crate::current;
use crate::event::Event;
use crate::execution::launch::launch_in;
use crate::graph_parts::{shape, sides};
use crate::handles;
use crate::order::Role;
use crate::status::Result;
use crate::stream::{self, Stream};
use crate::word::perform_words;

/// Submits the steps of a launch.
pub(crate) fn launch(flat: &Flat, stream: &Arc<Stream>) -> Result<()> {
    let defaults: Vec<(u64, u32)> = flat.steps.iter().filter_map(default).collect();
    let values = flat.values.clone();
    // The first command waits for room, and the following ones are part of the same launch.
    stream.submit(move |_| {
        for (handle, value) in defaults {
            values.set(handle, value);
        }
        Ok(())
    })?;
    let flat = Arc::new(flat.clone());
    let steps = || flat.steps.iter().enumerate().filter(|(_, step)| step.enabled && step.within.is_none());
    // Read before any step of the launch runs: some steps read memory that the others may write.
    let copies = steps().map(|(_, step)| taken(stream, step)).collect::<Result<Vec<_>>>()?;
    stream::as_one(|| {
        steps().zip(copies).try_for_each(|((place, _), copy)| match copy {
            Some(copy) => stream.submit(move |context| copy.run(context)).map(drop),
            None => perform(stream, &flat, place),
        })
    })
}

/// The value that a conditional step's condition gets at each launch, if it gets one.
fn default(step: &Step) -> Option<(u64, u32)> {
    match &step.task {
        Task::Conditional(it) if it.assigns => Some((it.handle, it.default)),
        _ => None,
    }
}

/// The copy of a step, with the bytes that it must read at once.
fn taken(stream: &Stream, step: &Step) -> Result<Option<copy::Copy>> {
    let Task::Copy(copy) = &step.task else { return Ok(None) };
    let ([dst, src], size) = sides(&copy.copy)?;
    copy::of_launch(stream, dst, src, size).map(Some)
}

type HostFunction = unsafe extern "C" fn(*mut c_void);

fn perform(stream: &Arc<Stream>, flat: &Arc<Flat>, place: usize) -> Result<()> {
    match &flat.steps[place].task {
        Task::Kernel(kernel) => {
            let context = current::named(kernel.context)?;
            let mut size = 0;
            let mut extra = extra(&kernel.parameters, &mut size);
            let extra = extra.as_mut_ptr();
            // SAFETY: the parameters were gathered by the kernel's layout, and live through the call.
            unsafe {
                let values = Some(flat.values.clone());
                launch_in(&context, stream, kernel.function, shape(kernel)?, (std::ptr::null_mut(), extra), values)
            }
        }
        Task::Fill(fill) => {
            let p = &fill.fill;
            let side = Side { pitch: p.pitch, ..Side::device(p.dst) };
            copy::fill(stream, side, p.value, p.element as usize, [p.width, p.height], false)
        }
        Task::Host(host) => {
            let host = *host;
            stream.submit(move |context| {
                context.flush_prints();
                // SAFETY: the function and what it takes are as the application gave them.
                unsafe {
                    let function = std::mem::transmute::<usize, HostFunction>(host.function as usize);
                    function(host.data as *mut c_void);
                }
                Ok(())
            })?;
            Ok(())
        }
        Task::Wait(event) => match handles::get::<Event>(*event)?.mark() {
            Some(mark) if !mark.reached() => stream.hold(mark),
            _ => Ok(()),
        },
        Task::Record(event) => handles::get::<Event>(*event)?.record(stream),
        Task::Words(words) => perform_words(stream, &words.operations),
        Task::Copy(_) => match taken(stream, &flat.steps[place])? {
            Some(copy) => stream.submit(move |context| copy.run(context)).map(drop),
            None => Ok(()),
        },
        Task::Conditional(it) => {
            let (flat, it, owner) = (flat.clone(), it.clone(), stream.context()?);
            stream.submit(move |_| run_bodies(&owner, &flat, place, &it)).map(drop)
        }
        Task::Child(_) | Task::Empty | Task::Allocate(_) | Task::Free(_) => Ok(()),
    }
}

const WHILE: u32 = 1;
const SWITCH: u32 = 2;

/// The body that a conditional step runs now, by its number.
fn body(values: &Values, it: &Conditional) -> Option<usize> {
    let value = values.get(it.handle) as usize;
    let number = match it.kind {
        SWITCH => value,
        _ => usize::from(value == 0),
    };
    (number < it.bodies.len()).then_some(number)
}

fn run_bodies(context: &Arc<Context>, flat: &Arc<Flat>, place: usize, it: &Conditional) -> Result<()> {
    let inner = Stream::new(context, 0, Role::NonBlocking, 0, None);
    let run = || {
        while let Some(number) = body(&flat.values, it) {
            context.check()?;
            let steps = flat.steps.iter().enumerate();
            let mut steps = steps.filter(|(_, step)| step.enabled && step.within == Some((place, number)));
            stream::as_one(|| steps.try_for_each(|(step, _)| perform(&inner, flat, step)))?;
            inner.last().wait();
            if it.kind != WHILE {
                break;
            }
        }
        context.check()
    };
    let ran = run();
    inner.end();
    inner.leave_order(context);
    ran
}

//! Conditions of the driver's graphs.
//!
//! A program may keep the handle of a condition anywhere, and its kernels give it to the driver's code. So the driver's handle must be
//! the one that the client has made up: the number of the condition in its graph, counted from 1. Drivers count so (measured, driver
//! 580); if one ever does not, its graph is not made.
//!
//! A condition without a default keeps its value from one launch to the next. Only the driver knows where: a kernel of the graph can
//! set it, and nobody can ask for it. But a condition outlives the nodes that look at it (measured as well). So its value is read
//! with other nodes, whose bodies say that they were run:
//!
//! ```text
//!   read   the graph's nodes go ──> for each condition a node whose bodies write their numbers ──launch──> the values
//!   write  conditions whose default is the value ──launch of empty bodies──> the graph's nodes ──> an executable graph
//!          ──update from a graph of conditions without a default──> the same, with the values that were read
//! ```

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use rekindle_cuda_abi::types::*;
use rekindle_wire::graph::{Conditional, Program};
use tracing::warn;

use super::Made;
use super::bodies::add_node;
use crate::session::call::Call;
use crate::session::outcome::{Refused, check};

/// `CU_GRAPH_COND_TYPE_*`.
const IF: u32 = 0;
const SWITCH: u32 = 2;

/// The values of conditions that are read at a time.
const WORDS: usize = 1024;

/// Memory that devices write, of the worker's own: an allocation would change what addresses the driver finds for the client.
#[repr(align(4096))]
struct Words([AtomicU32; WORDS]);

static WRITTEN: Words = Words([const { AtomicU32::new(0) }; WORDS]);
/// Held by whoever reads values.
static READING: Mutex<()> = Mutex::new(());

/// The driver's context of a context of the client's.
pub(super) fn context(call: &Call, context: u64) -> Result<CUcontext, Refused> {
    let object = call.session.objects.get(context).ok_or(Refused::Code(CUDA_ERROR_INVALID_CONTEXT))?;
    Ok(object.real)
}

/// The conditions of a program with the driver's contexts in which their nodes run.
fn conditions(call: &Call, program: &Program) -> Result<Vec<(Conditional, CUcontext)>, Refused> {
    let of = |(place, it): (usize, Conditional)| {
        Ok((it, context(call, program.steps.get(place).map_or(0, |step| step.context))?))
    };
    program.conditionals().into_iter().map(of).collect()
}

/// Whether a program has conditions that keep their values.
pub(super) fn any_keeps(program: &Program) -> bool {
    program.conditionals().iter().any(|(_, it)| !it.assigns)
}

/// Makes the conditions of a graph that is new. Those that keep their values begin with these, if there are any.
pub(super) fn create(call: &Call, graph: CUgraph, program: &Program, values: &[u32]) -> Result<(), Refused> {
    let conditions = conditions(call, program)?;
    for (number, (it, context)) in conditions.iter().enumerate() {
        let kept = values.get(number).copied().filter(|value| !it.assigns && *value != 0);
        let (default, assigns) = kept.map_or((it.default, it.assigns), |value| (value, true));
        let mut handle = 0;
        // SAFETY: the out parameter is a local; graph and context are the driver's own.
        check(unsafe {
            let create = call.driver().cuGraphConditionalHandleCreate;
            create(&raw mut handle, graph, *context, default, u32::from(assigns))
        })?;
        if handle != it.handle {
            warn!("the driver gives a condition the handle {handle:#x}, not {:#x}, which the program has", it.handle);
            return Err(Refused::Code(CUDA_ERROR_NOT_SUPPORTED));
        }
    }
    if has_values(program, values) {
        // The launch gives the conditions their defaults; its bodies do nothing.
        launch_instead(call, graph, &conditions, |_, _, _| Ok(()))?;
    }
    Ok(())
}

/// Whether a graph must begin with other values of its conditions than those of a new one.
pub(super) fn has_values(program: &Program, values: &[u32]) -> bool {
    let conditionals = program.conditionals();
    conditionals.iter().zip(values).any(|((_, it), value)| !it.assigns && *value != 0)
}

/// Launches nodes that look at the conditions of a graph without other nodes, waits for them, and removes them again. `fill` fills the
/// body of a number of the condition of a number.
fn launch_instead(
    call: &Call,
    graph: CUgraph,
    conditions: &[(Conditional, CUcontext)],
    mut fill: impl FnMut(CUgraph, usize, usize) -> Result<(), Refused>,
) -> Result<(), Refused> {
    let driver = call.driver();
    let mut nodes = Vec::with_capacity(conditions.len());
    for (number, (it, context)) in conditions.iter().enumerate() {
        // A node that would repeat its body asks once.
        let (kind, bodies) = if it.kind == SWITCH { (SWITCH, it.bodies) } else { (IF, 1) };
        let (node, bodies) = add_node(call, graph, &Conditional { kind, bodies, ..*it }, *context)?;
        nodes.push(node);
        for (body, graph) in bodies.into_iter().enumerate() {
            fill(graph, number, body)?;
        }
    }
    let mut exec = 0;
    // SAFETY: the out parameter is a local; graph and nodes are the driver's own. Nothing else runs in the default stream, or for
    // a moment only.
    unsafe {
        check((driver.cuGraphInstantiateWithFlags)(&raw mut exec, graph, 0))?;
        let launched = check((driver.cuGraphLaunch)(exec, CU_STREAM_LEGACY));
        let ended = launched.and_then(|()| check((driver.cuStreamSynchronize)(CU_STREAM_LEGACY)));
        (driver.cuGraphExecDestroy)(exec);
        ended?;
        nodes.into_iter().try_for_each(|node| check((driver.cuGraphDestroyNode)(node)))
    }
}

/// The values of a graph's conditions, by their numbers; those that a launch assigns count as 0. Nothing of the graph runs. It is
/// no more afterwards.
pub(super) fn read(call: &Call, made: Made, program: &Program) -> Result<Vec<u32>, Refused> {
    let read = read_values(call, &made, program);
    // SAFETY: the graph is the driver's own, and not used again.
    unsafe { (call.driver().cuGraphDestroy)(made.graph) };
    read
}

fn read_values(call: &Call, made: &Made, program: &Program) -> Result<Vec<u32>, Refused> {
    let driver = call.driver();
    let conditions = conditions(call, program)?;
    // SAFETY: all handles are the driver's own; nothing of the graph runs.
    unsafe {
        check((driver.cuGraphExecDestroy)(made.exec))?;
        for (node, _) in made.nodes.iter().zip(&program.steps).filter(|(_, step)| step.within.is_none()) {
            check((driver.cuGraphDestroyNode)(*node))?;
        }
    }
    if conditions.len() > WORDS {
        return Err(Refused::Code(CUDA_ERROR_NOT_SUPPORTED));
    }
    let _reading = READING.lock().unwrap_or_else(PoisonError::into_inner);
    WRITTEN.0.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    let place = (&raw const WRITTEN).cast_mut().cast::<c_void>();
    const PORTABLE: u32 = 1;
    // SAFETY: the memory is the worker's own, for as long as the process lives, and made for others' writes.
    check(unsafe { (driver.cuMemHostRegister_v2)(place, size_of::<Words>(), PORTABLE) })?;
    let launched = launch_instead(call, made.graph, &conditions, |body, number, which| {
        let (it, context) = conditions[number];
        if it.assigns {
            return Ok(());
        }
        let fill = CudaMemsetNodeParams {
            dst: place as u64 + number as u64 * 4,
            pitch: 4,
            value: which as u32 + 1,
            element: 4,
            width: 1,
            height: 1,
        };
        let (mut node, none) = (0, std::ptr::null());
        // SAFETY: the out parameter is a local; the word stays registered until the launch has ended.
        check(unsafe { (driver.cuGraphAddMemsetNode)(&raw mut node, body, none, 0, &raw const fill, context) })
    });
    // SAFETY: registered above.
    unsafe { (driver.cuMemHostUnregister)(place) };
    launched?;
    let value = |(number, (it, _)): (usize, &(Conditional, CUcontext))| {
        let written = WRITTEN.0[number].load(Ordering::Acquire);
        match (it.assigns, it.kind, written) {
            (true, ..) => 0,
            // A value for which there is no body.
            (false, SWITCH, 0) => it.bodies,
            (false, SWITCH, body) => body - 1,
            (false, _, ran) => ran,
        }
    };
    Ok(conditions.iter().enumerate().map(value).collect())
}

//! Conditions of the driver's graphs.
//!
//! A program may keep the handle of a condition anywhere, and its kernels give it to the driver's code. So the driver's handle must be
//! the one that the client has made up: the number of the condition in its graph, counted from 1. Drivers count so (measured, driver
//! 580); if one ever does not, its graph is not made.
//!
//! The value of a condition is not saved. One with a default has it at the start of each launch. One without has none there that a
//! program could count on: a new executable graph begins with what another one has left (measured).

use rekindle_cuda_abi::types::*;
use rekindle_wire::graph::Program;
use tracing::warn;

use crate::session::call::Call;
use crate::session::outcome::{Refused, check};

/// The driver's context of a context of the client's.
pub(super) fn context(call: &Call, context: u64) -> Result<CUcontext, Refused> {
    let object = call.session.objects.get(context).ok_or(Refused::Code(CUDA_ERROR_INVALID_CONTEXT))?;
    Ok(object.real)
}

/// Makes the conditions of a graph that is new.
pub(super) fn create(call: &Call, graph: CUgraph, program: &Program) -> Result<(), Refused> {
    for (place, it) in program.conditionals() {
        let context = context(call, program.steps.get(place).map_or(0, |step| step.context))?;
        let mut handle = 0;
        // SAFETY: the out parameter is a local; graph and context are the driver's own.
        check(unsafe {
            let create = call.driver().cuGraphConditionalHandleCreate;
            create(&raw mut handle, graph, context, it.default, u32::from(it.assigns))
        })?;
        if handle != it.handle {
            warn!("the driver gives a condition the handle {handle:#x}, not {:#x}, which the program has", it.handle);
            return Err(Refused::Code(CUDA_ERROR_NOT_SUPPORTED));
        }
    }
    Ok(())
}

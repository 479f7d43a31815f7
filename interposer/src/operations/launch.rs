//! Kernel launches.
//!
//! A launch does not wait, except if the driver would report its errors at once: the first launch of a function, and one
//! whose configuration differs from the last that succeeded.

use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rekindle_cuda_abi::launch::{self, CU_LAUNCH_ATTRIBUTE_COOPERATIVE};
use rekindle_cuda_abi::types::*;
use rekindle_graphs::{Kernel, hook};
use rekindle_wire::command::{ATTRIBUTE_BYTES, COOPERATIVE, LAUNCH, Launch};

use crate::call::Call;
use crate::connection::prints;
use crate::operations::{stream, variables};
use crate::process::calling_thread::named_stream;
use crate::state::functions::Function;
use crate::state::{client, contexts};

/// A function or kernel that can be launched in the current context.
pub(crate) fn launchable(handle: u64) -> Result<Arc<Function>, CUresult> {
    let client = client::get()?;
    if contexts::current() == 0 {
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    }
    let function = client.functions.get(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    variables::in_their_context(client, function.parent)?;
    Ok(function)
}

/// The kind of call that launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// One call with all parameters.
    Call,
    /// Calls that set the parts of a launch one by one, or a graph.
    Parts,
}

/// Gathers a launch's parameters at their offsets.
///
/// # Safety
/// `params` and `extra` are as `cuLaunchKernel` wants them for this function.
pub(crate) unsafe fn gather(
    function: &Function,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
    into: &mut Vec<u8>,
) -> Result<(), CUresult> {
    let size = function.params_size;
    // SAFETY: the caller's promise.
    unsafe { launch::gather(function.params.iter().copied(), size, params, extra, into) }?;
    // The driver accepts a buffer that is too short.
    into.resize(size.max(into.len()), 0);
    Ok(())
}

thread_local! {
    static PARAMETERS: std::cell::Cell<Vec<u8>> = const { std::cell::Cell::new(Vec::new()) };
}

/// Launches a kernel, or adds it to the graph that the stream captures.
///
/// # Safety
/// As `cuLaunchKernel`.
pub(crate) unsafe fn launch(
    mut what: Launch<'_>,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
    origin: Origin,
) -> Result<(), CUresult> {
    let function = launchable(what.function)?;
    let overwrites = origin == Origin::Call && function.has_legacy.load(Relaxed);
    // SAFETY: the caller's promise.
    if let Some(answer) = hook::launch(what.stream, || unsafe { node(&function, &what, params, extra) }) {
        check(answer)?;
        let mut parameters = Vec::new();
        // SAFETY: the caller's promise.
        if overwrites && unsafe { gather(&function, params, extra, &mut parameters) }.is_ok() {
            function.overwrite_legacy(what.block, what.shared_bytes, &parameters);
        }
        return Ok(());
    }
    prints::deliver(&client::get()?.connection);
    what.stream = named_stream(what.stream);
    let mut parameters = PARAMETERS.try_with(std::cell::Cell::take).unwrap_or_default();
    // SAFETY: the caller's promise.
    let sent = unsafe { gather(&function, params, extra, &mut parameters) }.and_then(|()| {
        let mut call = Call::in_context(LAUNCH)?;
        call.put(&Launch { parameters: &parameters, ..what });
        if overwrites {
            function.overwrite_legacy(what.block, what.shared_bytes, &parameters);
        }
        let digest = digest(&what);
        if function.proven.load(Relaxed) == digest {
            return check(call.send());
        }
        check(call.wait().0)?;
        function.proven.store(digest, Relaxed);
        Ok(())
    });
    let _ = PARAMETERS.try_with(|p| p.set(parameters));
    sent
}

/// A launch as a node of a graph.
///
/// # Safety
/// As [`launch()`].
unsafe fn node(
    function: &Function,
    what: &Launch<'_>,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result<Kernel, CUresult> {
    // A kernel in a green context's stream runs there, whatever context is current.
    let of_stream = stream::context_of(what.stream)?;
    let known = &client::get()?.contexts;
    let is_at_home = known.owner(of_stream) == known.owner(contexts::current());
    let mut kernel = Kernel {
        function: what.function,
        context: if is_at_home { of_stream } else { contexts::current() },
        grid: what.grid,
        block: what.block,
        shared_bytes: what.shared_bytes,
        layout: function.params.clone(),
        ..Default::default()
    };
    // SAFETY: the caller's promise.
    unsafe { gather(function, params, extra, &mut kernel.parameters) }?;
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    for attribute in what.attributes.chunks_exact(ATTRIBUTE_BYTES) {
        let (id, value) = attribute.split_at(8);
        let mut words = [0; 8];
        value.chunks_exact(8).zip(&mut words).for_each(|(bytes, w)| *w = word(bytes));
        kernel.attributes.insert(word(id) as u32, CUlaunchAttributeValue(words));
    }
    if what.flags & COOPERATIVE != 0 {
        kernel.attributes.insert(CU_LAUNCH_ATTRIBUTE_COOPERATIVE, CUlaunchAttributeValue::of_word(1));
    }
    Ok(kernel)
}

/// A digest of what the driver checks when a kernel is launched; never 0, which stands for "never launched". The
/// grid counts only where it is checked against more than the device's limits.
fn digest(what: &Launch<'_>) -> u64 {
    let mut hasher = DefaultHasher::new();
    (what.block, what.shared_bytes, what.flags, what.attributes).hash(&mut hasher);
    let grid_matters = what.flags != 0 || !what.attributes.is_empty();
    let grid_is_large = what.grid[0] > i32::MAX as u32 || what.grid[1] > 65_535 || what.grid[2] > 65_535;
    if grid_matters || grid_is_large || what.grid.contains(&0) {
        what.grid.hash(&mut hasher);
    }
    hasher.finish() | 1
}

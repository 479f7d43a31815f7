//! The state of each thread: the stack of current contexts, and the kind of default stream that a stream of 0 means.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rekindle_cuda_abi::types::{
    CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_CONTEXT, CUresult,
};

use crate::context::{Context, FIRST_API_VERSION};
use crate::contexts::primary;
use crate::device::devices;
use crate::green::{Converted, Green};
use crate::handles;
use crate::status::Result;
use crate::stream::Stream;
use crate::streams;

thread_local! {
    static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    static PER_THREAD_DEFAULT: Cell<bool> = const { Cell::new(false) };
    static NUMBER: u64 = {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
}

/// Runs a function whose stream of 0 means the per-thread default stream.
pub(crate) fn with_thread_stream(body: impl FnOnce() -> CUresult) -> CUresult {
    let before = PER_THREAD_DEFAULT.replace(true);
    let result = body();
    PER_THREAD_DEFAULT.set(before);
    result
}

/// Works on this thread's stack. A thread that is ending may have lost its stack.
fn with_stack<T>(body: impl FnOnce(&mut Vec<u64>) -> T) -> Option<T> {
    STACK.try_with(|stack| body(&mut stack.borrow_mut())).ok()
}

/// The handle on top of this thread's stack, 0 if it is empty.
pub(crate) fn handle() -> u64 {
    with_stack(|stack| stack.last().copied()).flatten().unwrap_or(0)
}

/// Puts a handle on top of the stack.
pub(crate) fn push(context: u64) {
    with_stack(|stack| stack.push(context));
}

/// Takes the handle on top of the stack off.
pub(crate) fn pop() -> Result<u64> {
    with_stack(Vec::pop).flatten().ok_or(CUDA_ERROR_INVALID_CONTEXT)
}

/// Replaces the top of the stack; 0 only takes it off.
pub(crate) fn set(context: u64) {
    with_stack(|stack| {
        stack.pop();
        if context != 0 {
            stack.push(context);
        }
    });
}

/// Takes a context off the top of the stack, if it is there: it is being destroyed.
pub(crate) fn forget(context: u64) {
    with_stack(|stack| {
        if stack.last() == Some(&context) {
            stack.pop();
        }
    });
}

/// The context that a handle names. An inactive primary context counts as destroyed.
pub(crate) fn named(handle: u64) -> Result<Arc<Context>> {
    for device in devices() {
        if device.primary == handle {
            return primary(device).active.clone().ok_or(CUDA_ERROR_CONTEXT_IS_DESTROYED);
        }
    }
    if let Ok(converted) = handles::get::<Converted>(handle) {
        return converted.0.context();
    }
    handles::get(handle).map_err(|_| CUDA_ERROR_INVALID_CONTEXT)
}

/// The green context that this thread's current context was converted from.
pub(crate) fn green() -> Option<Arc<Green>> {
    handles::get::<Converted>(handle()).ok().map(|it| it.0.clone())
}

/// Whether a handle can be made current. A primary context's can be while it is inactive: the runtime makes it current first
/// and retains it then.
pub(crate) fn ensure_known(handle: u64) -> Result<()> {
    match named(handle) {
        Ok(_) | Err(CUDA_ERROR_CONTEXT_IS_DESTROYED) => Ok(()),
        Err(code) => Err(code),
    }
}

/// The current context, or the one that a handle names if it is not 0.
pub(crate) fn or_named(context: u64) -> Result<Arc<Context>> {
    if context == 0 { current() } else { named(context) }
}

/// This thread's current context, whether it has failed or not.
pub(crate) fn current() -> Result<Arc<Context>> {
    match handle() {
        0 => Err(CUDA_ERROR_INVALID_CONTEXT),
        // The context on the stack was destroyed meanwhile.
        context => named(context).map_err(|_| CUDA_ERROR_CONTEXT_IS_DESTROYED),
    }
}

/// Calls of CUDA before 3.2 are for contexts that were made in their first form.
pub(crate) fn in_first_form() -> Result<()> {
    let version = current()?.api_version.load(Ordering::Relaxed);
    if version == FIRST_API_VERSION { Ok(()) } else { Err(CUDA_ERROR_INVALID_CONTEXT) }
}

/// This thread's current context, if it has not failed.
pub(crate) fn healthy() -> Result<Arc<Context>> {
    let context = current()?;
    context.check()?;
    Ok(context)
}

/// The stream that a handle means to this thread.
pub(crate) fn stream(handle: u64) -> Result<Arc<Stream>> {
    let context = current()?;
    let per_thread = PER_THREAD_DEFAULT.get();
    if (handle == CU_STREAM_LEGACY || handle == 0 && !per_thread)
        && let Some(green) = green()
    {
        return streams::default_of(&context, &green);
    }
    stream_of(&context, handle, per_thread)
}

/// The stream that a handle means to this thread in a context.
pub(crate) fn stream_of(context: &Arc<Context>, handle: u64, per_thread: bool) -> Result<Arc<Stream>> {
    let handle = match handle {
        0 if per_thread => CU_STREAM_PER_THREAD,
        0 => CU_STREAM_LEGACY,
        handle => handle,
    };
    streams::find(context, handle, NUMBER.with(|n| *n))
}

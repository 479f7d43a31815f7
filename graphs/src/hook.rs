//! Calls outside of this crate that a capture may record or forbid. Each costs one look at a number as long as nothing
//! captures.

use rekindle_cuda_abi::launch::{
    CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT, CU_LAUNCH_ATTRIBUTE_PRIORITY, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT,
};
use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::capture;
use crate::driver::{Role, driver};
use crate::graph::{PORT_LAUNCH_ORDER, PORT_PROGRAMMATIC, PROGRAMMATIC};
use crate::store::with;
use crate::task::{Copy, Fill, Host, Kernel, Task, Words};

/// `CU_EVENT_RECORD_EXTERNAL` and `CU_EVENT_WAIT_EXTERNAL`: a node of its own.
const EXTERNAL: u32 = 1;

/// A call that could harm a capture.
const UNSAFE: &[&str] = &[
    "cuArray3DCreate_v2",
    "cuArrayCreate_v2",
    "cuCtxResetPersistingL2Cache",
    "cuCtxSetCacheConfig",
    "cuCtxSetLimit",
    "cuCtxSetSharedMemConfig",
    "cuDevicePrimaryCtxReset",
    "cuDevicePrimaryCtxReset_v2",
    "cuGraphExecDestroy",
    "cuGraphInstantiate",
    "cuGraphInstantiateWithFlags",
    "cuGraphInstantiateWithParams",
    "cuGraphInstantiateWithParams_ptsz",
    "cuGraphInstantiate_v2",
    "cuLibraryUnload",
    "cuMemAllocHost",
    "cuMemAllocHost_v2",
    "cuMemAllocManaged",
    "cuMemAllocPitch",
    "cuMemAllocPitch_v2",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemHostRegister",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolTrimTo",
    "cuMipmappedArrayCreate",
    "cuModuleUnload",
];

/// A call that does its work in the default stream, and waits. No other capture forbids it.
const DEFAULT_STREAM: &[&str] = &[
    "cuMemcpy",
    "cuMemcpy2DUnaligned_v2",
    "cuMemcpy2D_v2",
    "cuMemcpy3DPeer",
    "cuMemcpy3D_v2",
    "cuMemcpyDtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuMemcpyPeer",
    "cuMemsetD16_v2",
    "cuMemsetD2D16_v2",
    "cuMemsetD2D32_v2",
    "cuMemsetD2D8_v2",
    "cuMemsetD32_v2",
    "cuMemsetD8_v2",
];

/// Called before a call, with its symbol: fails where a capture forbids the call.
///
/// # Errors
/// The call's error where a capture forbids the call. The capture is invalid then.
#[inline]
pub fn before(symbol: &str) -> Result<()> {
    if capture::any() { before_while_capturing(symbol) } else { Ok(()) }
}

#[cold]
fn before_while_capturing(symbol: &str) -> Result<()> {
    // Forms for the per-thread default stream have a base that is listed.
    let base = symbol.strip_suffix("_ptds").unwrap_or(symbol);
    if UNSAFE.binary_search(&symbol).is_ok() {
        return with(|store| store.captures.refuse_unsafe());
    }
    if DEFAULT_STREAM.binary_search(&base).is_ok() {
        let per_thread = base != symbol;
        let name = if per_thread { CU_STREAM_PER_THREAD } else { CU_STREAM_LEGACY };
        let Ok(stream) = driver()?.stream(name) else { return Ok(()) };
        return with(|store| store.captures.refuse_in(&stream));
    }
    Ok(())
}

/// A call that asks or waits for a stream.
///
/// # Errors
/// The call's error where a capture forbids it.
#[inline]
pub fn stream_asked(stream: CUstream) -> Result<()> {
    if !capture::any() {
        return Ok(());
    }
    let Ok(stream) = driver()?.stream(stream) else { return Ok(()) };
    with(|store| {
        store.captures.refuse_in(&stream)?;
        store.captures.refuse_unsafe()
    })
}

/// A call in a stream that cannot be captured.
///
/// # Errors
/// The call's error where the stream captures, or may not be used for a capture.
#[inline]
pub fn not_capturable(stream: CUstream) -> Result<()> {
    if !capture::any() {
        return Ok(());
    }
    let Ok(stream) = driver()?.stream(stream) else { return Ok(()) };
    with(|store| store.captures.refuse_in(&stream))
}

/// A call that waits for all of a context.
///
/// # Errors
/// The call's error where a capture forbids it.
#[inline]
pub fn context_asked(context: CUcontext) -> Result<()> {
    if !capture::any() {
        return Ok(());
    }
    with(|store| {
        store.captures.refuse_context(context)?;
        store.captures.refuse_unsafe()
    })
}

/// A call that asks or waits for an event.
///
/// # Errors
/// The call's error where a capture forbids it, or the event was last recorded in one.
#[inline]
pub fn event_asked(event: CUevent) -> Result<()> {
    if !capture::any_or_event() {
        return Ok(());
    }
    with(|store| {
        store.captures.refuse_event(event)?;
        store.captures.refuse_unsafe()
    })
}

/// Times between events: no question about what is under way.
///
/// # Errors
/// As [`event_asked`].
#[inline]
pub fn events_compared(first: CUevent, second: CUevent) -> Result<()> {
    if !capture::any_or_event() {
        return Ok(());
    }
    with(|store| {
        store.captures.refuse_event(first)?;
        store.captures.refuse_event(second)
    })
}

/// An event is destroyed.
#[inline]
pub fn event_destroyed(event: CUevent) {
    if capture::any_or_event() {
        let _ = with(|store| {
            store.captures.forget_event(event);
            Ok(())
        });
    }
}

/// An event is recorded for all of a context, in no stream.
///
/// # Errors
/// The call's error where a stream of the context captures.
#[inline]
pub fn record_in_context(event: CUevent, context: CUcontext) -> Result<()> {
    if !capture::any_or_event() {
        return Ok(());
    }
    with(|store| {
        store.captures.refuse_context(context)?;
        store.captures.forget_event(event);
        Ok(())
    })
}

/// All of a context is to wait for an event.
///
/// # Errors
/// The call's error where a stream of the context captures, or the event was last recorded in a capture.
#[inline]
pub fn wait_in_context(context: CUcontext, event: CUevent) -> Result<()> {
    if !capture::any_or_event() {
        return Ok(());
    }
    with(|store| {
        store.captures.refuse_context(context)?;
        store.captures.refuse_event(event).map_err(|code| match code {
            CUDA_ERROR_CAPTURED_EVENT => CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            other => other,
        })
    })
}

/// A stream is destroyed.
#[inline]
pub fn stream_destroyed(stream: CUstream) {
    if capture::any()
        && let Ok(driver) = driver()
        && let Ok(stream) = driver.stream(stream)
    {
        let _ = with(|store| {
            store.captures.forget_stream(&mut store.graphs, stream.key);
            Ok(())
        });
    }
}

/// A context is destroyed or reset.
pub fn context_gone(context: CUcontext) {
    if capture::any() {
        let _ = with(|store| {
            store.captures.forget_context(&mut store.graphs, context);
            Ok(())
        });
    }
}

/// An event is recorded in a stream. `Some` is the call's answer; otherwise the call is to be executed.
#[inline]
pub fn record(event: CUevent, stream: CUstream, flags: u32) -> Option<CUresult> {
    if flags & !EXTERNAL != 0 {
        return Some(CUDA_ERROR_INVALID_VALUE);
    }
    if flags == 0 && !capture::any_or_event() {
        return None;
    }
    let work = || {
        let stream = driver()?.stream(stream)?;
        with(|store| {
            if flags == 0 {
                return store.captures.record(event, &stream);
            }
            match store.captures.enqueue(&mut store.graphs, &stream, || Ok(Task::Record(event)))? {
                Some(_) => Ok(true),
                None => Err(CUDA_ERROR_ILLEGAL_STATE),
            }
        })
    };
    answer(work())
}

/// A stream is to wait for an event; `recorded` is whether it has been recorded outside of captures. As [`record`].
#[inline]
pub fn wait(stream: CUstream, event: CUevent, flags: u32, recorded: impl FnOnce() -> bool) -> Option<CUresult> {
    if flags & !EXTERNAL != 0 {
        return Some(CUDA_ERROR_INVALID_VALUE);
    }
    if flags == 0 && !capture::any_or_event() {
        return None;
    }
    let work = || {
        let stream = driver()?.stream(stream)?;
        let recorded = recorded();
        with(|store| {
            if flags == 0 {
                return store.captures.wait(&stream, event, recorded);
            }
            match store.captures.enqueue(&mut store.graphs, &stream, || Ok(Task::Wait(event)))? {
                Some(_) => Ok(true),
                None => Err(CUDA_ERROR_ILLEGAL_STATE),
            }
        })
    };
    answer(work())
}

fn answer(handled: Result<bool>) -> Option<CUresult> {
    match handled {
        Ok(true) => Some(CUDA_SUCCESS),
        Ok(false) => None,
        Err(code) => Some(code),
    }
}

/// A command is enqueued in a stream. As [`record`].
fn enqueue(stream: CUstream, task: impl FnOnce() -> Result<Task>) -> Option<CUresult> {
    if !capture::any() {
        return None;
    }
    let work = || {
        let stream = driver()?.stream(stream)?;
        Ok(with(|store| store.captures.enqueue(&mut store.graphs, &stream, task))?.is_some())
    };
    answer(work())
}

/// Whether a stream captures: its commands are not to be executed.
#[inline]
pub fn captures(stream: CUstream) -> bool {
    capture::any()
        && driver().and_then(|driver| driver.stream(stream)).is_ok_and(|stream| {
            with(|store| Ok(store.captures.status(stream.key) != capture::Status::None)).unwrap_or(false)
        })
}

/// A kernel is launched. `attributes` are `CUlaunchAttribute`s; `parameters` gathers the parameters by the layout.
#[inline]
pub fn launch(stream: CUstream, kernel: impl FnOnce() -> Result<Kernel>) -> Option<CUresult> {
    if !capture::any() {
        return None;
    }
    let work = || {
        let driver = driver()?;
        let stream = driver.stream(stream)?;
        with(|store| {
            let mut events = Vec::new();
            let node = store.captures.enqueue_checked(&mut store.graphs, &stream, true, || {
                let mut kernel = kernel()?;
                driver.check_kernel(&kernel)?;
                events = ports(&kernel);
                if stream.priority != 0 {
                    let priority = CUlaunchAttributeValue::of_word(stream.priority.cast_unsigned());
                    kernel.attributes.entry(CU_LAUNCH_ATTRIBUTE_PRIORITY).or_insert(priority);
                }
                Ok(Task::Kernel(kernel))
            })?;
            let Some(node) = node else { return Ok(false) };
            events.into_iter().for_each(|(event, data)| store.captures.record_at_port(event, &stream, node, data));
            Ok(true)
        })
    };
    answer(work())
}

/// The events that a kernel records by its attributes, and where.
fn ports(kernel: &Kernel) -> Vec<(CUevent, CUgraphEdgeData)> {
    let mut events = Vec::new();
    let edge = |from_port, kind| CUgraphEdgeData { from_port, kind, ..Default::default() };
    if let Some(CUlaunchAttributeValue(value)) = kernel.attributes.get(&CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT) {
        // An int of flags, then whether the trigger is the blocks' start.
        let at_start = value[1] >> 32 != 0;
        let port = if at_start { PORT_LAUNCH_ORDER } else { PORT_PROGRAMMATIC };
        events.push((value[0], edge(port, PROGRAMMATIC)));
    }
    if let Some(CUlaunchAttributeValue(value)) = kernel.attributes.get(&CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT) {
        events.push((value[0], edge(PORT_LAUNCH_ORDER, 0)));
    }
    events
}

/// A copy is enqueued.
#[inline]
pub fn copy(stream: CUstream, copy: impl FnOnce() -> CudaMemcpy3d) -> Option<CUresult> {
    if !capture::any() {
        return None;
    }
    enqueue(stream, || {
        let driver = driver()?;
        let copy = Copy { copy: copy(), context: driver.current()? };
        driver.check_copy(&copy)?;
        Ok(Task::Copy(copy))
    })
}

/// A copy of bytes in a row is enqueued: the kinds of memory are `CU_MEMORYTYPE_*`.
#[inline]
pub fn copy_bytes(stream: CUstream, dst: (u32, u64), src: (u32, u64), bytes: usize) -> Option<CUresult> {
    if !capture::any() {
        return None;
    }
    if bytes == 0 {
        // There is nothing to record, but the stream must still be one that may be used.
        let work = || {
            let stream = driver()?.stream(stream)?;
            with(|store| {
                store.captures.refuse_implicit(&stream)?;
                match store.captures.status(stream.key) {
                    capture::Status::Invalidated => Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
                    status => Ok(status != capture::Status::None),
                }
            })
        };
        return answer(work());
    }
    let side = |(kind, address): (u32, u64)| {
        let (host, device) = if kind == CU_MEMORYTYPE_HOST { (address, 0) } else { (0, address) };
        CudaMemcpy3dSide { kind, host, device, ..Default::default() }
    };
    copy(stream, || CudaMemcpy3d::of_bytes(side(dst), side(src), bytes))
}

/// A memset is enqueued.
#[inline]
pub fn fill(stream: CUstream, fill: impl FnOnce() -> CudaMemsetNodeParams) -> Option<CUresult> {
    if !capture::any() {
        return None;
    }
    enqueue(stream, || {
        let driver = driver()?;
        let fill = Fill { fill: fill(), context: driver.current()? };
        driver.check_fill(&fill)?;
        Ok(Task::Fill(fill))
    })
}

/// A function of the host's is enqueued.
#[inline]
pub fn host(stream: CUstream, function: u64, data: u64) -> Option<CUresult> {
    enqueue(stream, || {
        if function == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(Task::Host(Host { function, data }))
    })
}

/// Operations on words of memory are enqueued.
#[inline]
pub fn words(
    stream: CUstream,
    operations: impl FnOnce() -> Vec<CUstreamBatchMemOpParams>,
    flags: u32,
) -> Option<CUresult> {
    enqueue(stream, || {
        let driver = driver()?;
        let words = Words { context: driver.current()?, operations: operations(), flags };
        driver.check_words(&words)?;
        Ok(Task::Words(words))
    })
}

/// Memory is allocated in a stream's order, on a device or on that of the current context. `Some` is the call's answer.
#[inline]
pub fn allocate(stream: CUstream, bytes: usize, device: Option<CUdevice>) -> Option<Result<CUdeviceptr>> {
    if !capture::any() {
        return None;
    }
    let work = || {
        let driver = driver()?;
        let on = driver.stream(stream)?;
        let status = with(|store| {
            store.captures.refuse_implicit(&on)?;
            let status = store.captures.status(on.key);
            if status == capture::Status::None && on.role != Role::Legacy {
                store.captures.refuse_unsafe()?;
            }
            Ok(status)
        })?;
        match status {
            capture::Status::None => return Ok(None),
            capture::Status::Invalidated => return Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
            capture::Status::Active(_) => {}
        }
        if bytes == 0 {
            return Ok(Some(0));
        }
        let device = match device {
            Some(device) => device,
            None => driver.device(on.key.context)?,
        };
        let address = driver.allocate(device, bytes)?;
        let made = with(|store| {
            store.graphs.memory.add(address, bytes, device);
            let task = || Ok(Task::Allocate(crate::task::Memory { address, bytes, device }));
            let node = store
                .captures
                .enqueue(&mut store.graphs, &on, task)
                .and_then(|node| node.ok_or(CUDA_ERROR_ILLEGAL_STATE));
            node.inspect_err(|_| store.graphs.memory.release(address))
        });
        made.map(|_| Some(address))
    };
    work().transpose()
}

/// Memory is freed in a stream's order. As [`record`]; also for memory of graphs outside of captures.
#[inline]
pub fn free_async(address: CUdeviceptr, stream: CUstream) -> Option<CUresult> {
    let work = || {
        with(|store| {
            if store.graphs.memory.is_empty() && store.captures.list.is_empty() {
                return Ok(false);
            }
            let on = driver()?.stream(stream)?;
            store.captures.refuse_implicit(&on)?;
            let of_graph = store.graphs.memory.contains(address);
            if store.captures.status(on.key) == capture::Status::None {
                store.captures.refuse_unsafe()?;
                return store.graphs.memory.free(address).transpose().map(|freed| freed.is_some());
            }
            let task = || if of_graph { Ok(Task::Free(address)) } else { Err(CUDA_ERROR_INVALID_VALUE) };
            store.captures.enqueue(&mut store.graphs, &on, task).map(|node| node.is_some())
        })
    };
    if !crate::memory::any() && !capture::any() {
        return None;
    }
    answer(work())
}

/// Memory is freed by a call that waits. As [`record`].
#[inline]
pub fn free(address: CUdeviceptr) -> Option<CUresult> {
    if !crate::memory::any() {
        return None;
    }
    answer(with(|store| store.graphs.memory.free(address).transpose().map(|freed| freed.is_some())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_in_order_to_be_searched() {
        assert!(UNSAFE.is_sorted() && DEFAULT_STREAM.is_sorted());
    }
}

//! Captures.

use rekindle_cuda_abi::types::*;

use super::{call, edges, ensure, put, put_if, read};
use crate::Result;
use crate::capture::{Mode, Status, exchange_mode};
use crate::driver::driver;
use crate::store::with;

pub unsafe fn cuStreamBeginCapture_v2(stream: CUstream, mode: u32) -> CUresult {
    call(|| {
        let mode = Mode::new(mode)?;
        let stream = driver()?.stream(stream)?;
        with(|store| store.begin_capture(&stream, mode, None))
    })
}

pub unsafe fn cuStreamBeginCapture(stream: CUstream) -> CUresult {
    unsafe { cuStreamBeginCapture_v2(stream, 0) }
}

pub unsafe fn cuStreamBeginCaptureToGraph(
    stream: CUstream,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
    mode: u32,
) -> CUresult {
    call(|| {
        let mode = Mode::new(mode)?;
        let after = unsafe { edges(nodes, data, count) }?;
        let stream = driver()?.stream(stream)?;
        with(|store| {
            store.graph(graph)?;
            store.begin_capture(&stream, mode, Some((graph, after)))
        })
    })
}

/// A capture that fails leaves a null graph.
pub unsafe fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> CUresult {
    call(|| {
        let stream = driver()?.stream(stream)?;
        let ended = with(|store| store.end_capture(&stream));
        unsafe { put_if(graph, *ended.as_ref().unwrap_or(&0)) };
        ended.map(drop)
    })
}

fn status(stream: CUstream) -> Result<(Status, crate::driver::Stream)> {
    let stream = driver()?.stream(stream)?;
    if !crate::capture::any() {
        return Ok((Status::None, stream));
    }
    with(|store| {
        // Asking does no harm.
        ensure(!store.captures.is_implicit(&stream), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)?;
        Ok((store.captures.status(stream.key), stream))
    })
}

/// `CU_STREAM_CAPTURE_STATUS_*`.
fn number(status: Status) -> u32 {
    match status {
        Status::None => 0,
        Status::Active(_) => 1,
        Status::Invalidated => 2,
    }
}

pub unsafe fn cuStreamIsCapturing(stream: CUstream, out: *mut u32) -> CUresult {
    call(|| unsafe { put(out, number(status(stream)?.0)) })
}

pub unsafe fn cuStreamGetCaptureInfo(stream: CUstream, out: *mut u32, id: *mut u64) -> CUresult {
    call(|| unsafe { info(stream, out, id, std::ptr::null_mut(), std::ptr::null_mut(), None, std::ptr::null_mut()) })
}

unsafe fn info(
    stream: CUstream,
    out: *mut u32,
    id: *mut u64,
    graph: *mut CUgraph,
    nodes: *mut *const CUgraphNode,
    data: Option<*mut *const CUgraphEdgeData>,
    count: *mut usize,
) -> Result<()> {
    ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
    let wants_data = data.is_some_and(|d| !d.is_null());
    ensure(!wants_data || !nodes.is_null(), CUDA_ERROR_INVALID_VALUE)?;
    let (status, stream) = status(stream)?;
    let Status::Active(capture) = status else { return unsafe { put(out, number(status)) } };
    with(|store| {
        let member = store.captures.streams.get_mut(&stream.key).ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
        let plain = member.after.iter().all(|e| e.1 == CUgraphEdgeData::default());
        ensure(plain || nodes.is_null() || wants_data, CUDA_ERROR_LOSSY_QUERY)?;
        member.shown = member.after.iter().copied().unzip();
        let of = store.captures.list.get(&capture).map_or(0, |c| c.graph);
        let shown = &store.captures.streams[&stream.key].shown;
        unsafe {
            put(out, number(status))?;
            put_if(id, capture);
            put_if(graph, of);
            put_if(nodes, shown.0.as_ptr());
            put_if(data.unwrap_or(std::ptr::null_mut()), shown.1.as_ptr());
            put_if(count, shown.0.len());
        }
        Ok(())
    })
}

pub unsafe fn cuStreamGetCaptureInfo_v2(
    stream: CUstream,
    out: *mut u32,
    id: *mut u64,
    graph: *mut CUgraph,
    nodes: *mut *const CUgraphNode,
    count: *mut usize,
) -> CUresult {
    call(|| unsafe { info(stream, out, id, graph, nodes, None, count) })
}

pub unsafe fn cuStreamGetCaptureInfo_v3(
    stream: CUstream,
    out: *mut u32,
    id: *mut u64,
    graph: *mut CUgraph,
    nodes: *mut *const CUgraphNode,
    data: *mut *const CUgraphEdgeData,
    count: *mut usize,
) -> CUresult {
    call(|| unsafe { info(stream, out, id, graph, nodes, Some(data), count) })
}

pub unsafe fn cuStreamUpdateCaptureDependencies(
    stream: CUstream,
    nodes: *mut CUgraphNode,
    count: usize,
    flags: u32,
) -> CUresult {
    unsafe { cuStreamUpdateCaptureDependencies_v2(stream, nodes, std::ptr::null(), count, flags) }
}

pub unsafe fn cuStreamUpdateCaptureDependencies_v2(
    stream: CUstream,
    nodes: *mut CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
    flags: u32,
) -> CUresult {
    const SET: u32 = 1;
    call(|| {
        ensure(flags <= SET, CUDA_ERROR_INVALID_VALUE)?;
        let edges = unsafe { edges(nodes, data, count) }?;
        let stream = driver()?.stream(stream)?;
        with(|store| store.update_dependencies(&stream, &edges, flags == SET))
    })
}

/// Needs no context, and no `cuInit`.
pub unsafe fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) -> CUresult {
    let exchange = || {
        // The driver takes what is none for the least strict one, without an error.
        let new = Mode::new(unsafe { read(mode) }?).unwrap_or(Mode::Relaxed);
        unsafe { put(mode, exchange_mode(new) as u32) }
    };
    exchange().err().unwrap_or(CUDA_SUCCESS)
}

//! Captures.

use rekindle_cuda_abi::arguments::{Count, InArray, InOut, Out};
use rekindle_cuda_abi::types::*;

use super::call::{call, edges};
use crate::Result;
use crate::capture::{Mode, Status, exchange_mode};
use crate::driver::driver;
use crate::store::with;

pub fn cuStreamBeginCapture_v2(stream: CUstream, mode: u32) -> CUresult {
    call(|| {
        let mode = Mode::new(mode)?;
        let stream = driver()?.stream(stream)?;
        with(|store| store.captures.begin(&mut store.graphs, &stream, mode, None))
    })
}

pub fn cuStreamBeginCapture(stream: CUstream) -> CUresult {
    cuStreamBeginCapture_v2(stream, 0)
}

pub fn cuStreamBeginCaptureToGraph(
    stream: CUstream,
    graph: CUgraph,
    nodes: InArray<CUgraphNode>,
    data: InArray<CUgraphEdgeData>,
    count: Count,
    mode: u32,
) -> CUresult {
    call(|| {
        let mode = Mode::new(mode)?;
        let after = edges(nodes, data, count)?;
        let stream = driver()?.stream(stream)?;
        with(|store| {
            store.graphs.graph(graph)?;
            store.captures.begin(&mut store.graphs, &stream, mode, Some((graph, after)))
        })
    })
}

/// A capture that fails leaves a null graph.
pub fn cuStreamEndCapture(stream: CUstream, graph: Out<CUgraph>) -> CUresult {
    call(|| {
        let stream = driver()?.stream(stream)?;
        let ended = with(|store| store.captures.end(&mut store.graphs, &stream));
        graph.put_if(*ended.as_ref().unwrap_or(&0));
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

pub fn cuStreamIsCapturing(stream: CUstream, out: Out<u32>) -> CUresult {
    call(|| out.put(number(status(stream)?.0)))
}

pub fn cuStreamGetCaptureInfo(stream: CUstream, out: Out<u32>, id: Out<u64>) -> CUresult {
    call(|| info(stream, out, id, Out::null(), Out::null(), None, Out::null()))
}

fn info(
    stream: CUstream,
    out: Out<u32>,
    id: Out<u64>,
    graph: Out<CUgraph>,
    nodes: Out<*const CUgraphNode>,
    data: Option<Out<*const CUgraphEdgeData>>,
    count: Out<usize>,
) -> Result<()> {
    out.require()?;
    let wants_data = data.is_some_and(|d| !d.is_null());
    ensure(!wants_data || !nodes.is_null(), CUDA_ERROR_INVALID_VALUE)?;
    let (status, stream) = status(stream)?;
    let Status::Active(capture) = status else { return out.put(number(status)) };
    with(|store| {
        let member = store.captures.streams.get_mut(&stream.key).ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
        let plain = member.after.iter().all(|e| e.1 == CUgraphEdgeData::default());
        ensure(plain || nodes.is_null() || wants_data, CUDA_ERROR_LOSSY_QUERY)?;
        member.shown = member.after.iter().copied().unzip();
        let of = store.captures.list.get(&capture).map_or(0, |c| c.graph);
        let shown = &store.captures.streams[&stream.key].shown;
        out.put(number(status))?;
        id.put_if(capture);
        graph.put_if(of);
        nodes.put_if(shown.0.as_ptr());
        data.unwrap_or(Out::null()).put_if(shown.1.as_ptr());
        count.put_if(shown.0.len());
        Ok(())
    })
}

pub fn cuStreamGetCaptureInfo_v2(
    stream: CUstream,
    out: Out<u32>,
    id: Out<u64>,
    graph: Out<CUgraph>,
    nodes: Out<*const CUgraphNode>,
    count: Out<usize>,
) -> CUresult {
    call(|| info(stream, out, id, graph, nodes, None, count))
}

pub fn cuStreamGetCaptureInfo_v3(
    stream: CUstream,
    out: Out<u32>,
    id: Out<u64>,
    graph: Out<CUgraph>,
    nodes: Out<*const CUgraphNode>,
    data: Out<*const CUgraphEdgeData>,
    count: Out<usize>,
) -> CUresult {
    call(|| info(stream, out, id, graph, nodes, Some(data), count))
}

pub fn cuStreamUpdateCaptureDependencies(
    stream: CUstream,
    nodes: InArray<CUgraphNode>,
    count: Count,
    flags: u32,
) -> CUresult {
    cuStreamUpdateCaptureDependencies_v2(stream, nodes, InArray::null(), count, flags)
}

pub fn cuStreamUpdateCaptureDependencies_v2(
    stream: CUstream,
    nodes: InArray<CUgraphNode>,
    data: InArray<CUgraphEdgeData>,
    count: Count,
    flags: u32,
) -> CUresult {
    const SET: u32 = 1;
    call(|| {
        ensure(flags <= SET, CUDA_ERROR_INVALID_VALUE)?;
        let edges = edges(nodes, data, count)?;
        let stream = driver()?.stream(stream)?;
        with(|store| store.captures.update_dependencies(&store.graphs, &stream, &edges, flags == SET))
    })
}

/// Needs no context, and no `cuInit`.
pub fn cuThreadExchangeStreamCaptureMode(mode: InOut<u32>) -> CUresult {
    let exchange = || {
        // The driver takes what is none for the least strict one, without an error.
        let new = Mode::new(*mode.read()?).unwrap_or(Mode::Relaxed);
        mode.put(exchange_mode(new) as u32)
    };
    code(exchange())
}

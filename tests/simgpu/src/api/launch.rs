//! Launches.

use std::ffi::c_void;
use std::sync::{Arc, PoisonError};

use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CUDA_SUCCESS, CUfunction, CUlaunchAttribute, CUlaunchAttributeValue,
    CUlaunchConfig, CUresult, CUstream, CudaLaunchParams,
};

use rekindle_graphs::{Kernel, hook};

use crate::context::Context;
use crate::current;
use crate::execution::launch::{Shape, gather, launch, launch_in};
use crate::handles::{self, Object};
use crate::library::function_in;
use crate::module::Legacy;
use crate::status::{Result, ensure, status};
use crate::stream::{Mark, Stream};

pub unsafe fn cuLaunchKernel(
    handle: CUfunction,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared: u32,
    stream: CUstream,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    let shape = Shape {
        grid: [grid_x, grid_y, grid_z],
        block: [block_x, block_y, block_z],
        shared,
        cooperative: false,
        cluster: [1; 3],
    };
    status(|| unsafe { launch_or_capture(handle, shape, stream, &[], params, extra) })
}

pub unsafe fn cuLaunchCooperativeKernel(
    handle: CUfunction,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared: u32,
    stream: CUstream,
    params: *mut *mut c_void,
) -> CUresult {
    let shape = Shape {
        grid: [grid_x, grid_y, grid_z],
        block: [block_x, block_y, block_z],
        shared,
        cooperative: true,
        cluster: [1; 3],
    };
    status(|| unsafe { launch_or_capture(handle, shape, stream, &[], params, std::ptr::null_mut()) })
}

/// Launches a kernel, or has a capture take it.
unsafe fn launch_or_capture(
    handle: CUfunction,
    shape: Shape,
    stream: CUstream,
    attributes: &[CUlaunchAttribute],
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result<()> {
    let captured = hook::launch(stream, || {
        const COOPERATIVE: u32 = 2;
        let context = current::healthy()?;
        let function = function_in(&context, handle)?;
        let layout = function.kernel.params.iter().map(|p| (p.offset, p.size)).collect();
        let parameters = unsafe { gather(&function, params, extra) }?;
        let mut kernel = Kernel {
            function: handle,
            context: context.handle,
            grid: shape.grid,
            block: shape.block,
            shared_bytes: shape.shared,
            layout,
            parameters,
            ..Default::default()
        };
        kernel.attributes.extend(attributes.iter().map(|a| (a.id, CUlaunchAttributeValue(a.value))));
        if shape.cooperative {
            kernel.attributes.insert(COOPERATIVE, CUlaunchAttributeValue([1, 0, 0, 0, 0, 0, 0, 0]));
        }
        Ok(kernel)
    });
    // Looked at before: the kernel may have broken the context when the launch is over.
    let (block, shared) = (shape.block, shape.shared);
    let found = current::healthy().and_then(|context| {
        let function = function_in(&context, handle)?;
        Ok((unsafe { gather(&function, params, extra) }?, function))
    });
    match captured {
        Some(code) => ensure(code == CUDA_SUCCESS, code),
        None => unsafe { launch(handle, shape, stream, params, extra) },
    }?;
    // What was set one by one is overwritten (cuda.h at `cuLaunch` and `cuLaunchCooperativeKernel`).
    if let Ok((parameters, function)) = found {
        let size = parameters.len();
        *function.legacy.lock().unwrap_or_else(PoisonError::into_inner) = Legacy { block, shared, parameters, size };
    }
    Ok(())
}

/// The shape that a configuration with attributes describes.
pub(super) unsafe fn shape(config: &CUlaunchConfig) -> Result<Shape> {
    let mut shape = Shape {
        grid: config.grid,
        block: config.block,
        shared: config.shared_bytes,
        cooperative: false,
        cluster: [1; 3],
    };
    ensure(config.num_attrs == 0 || !config.attrs.is_null(), CUDA_ERROR_INVALID_VALUE)?;
    for i in 0..config.num_attrs as usize {
        let attribute = unsafe { config.attrs.add(i).read_unaligned() };
        let [first, second] = [attribute.value[0], attribute.value[1]];
        match attribute.id {
            // What is cached, how is waited, priorities, memory domains, carveouts: hints.
            0 | 1 | 3 | 5 | 8 | 9 | 10 | 11 | 14 => {}
            2 => shape.cooperative = first as u32 != 0,
            4 => shape.cluster = [first as u32, (first >> 32) as u32, second as u32].map(|n| n.max(1)),
            // A kernel may begin before its predecessor has ended, and need not.
            6 => {}
            // Events are recorded behind the kernel, see `cuLaunchKernelEx`.
            7 | 12 => drop(handles::event(first)?),
            16 => {}
            _ => return Err(CUDA_ERROR_NOT_SUPPORTED),
        }
    }
    let divides = shape.grid.iter().zip(shape.cluster).all(|(grid, cluster)| grid.is_multiple_of(cluster));
    ensure(divides, CUDA_ERROR_INVALID_VALUE)?;
    Ok(shape)
}

pub unsafe fn cuLaunchKernelEx(
    config: *const CUlaunchConfig,
    handle: CUfunction,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    status(|| {
        ensure(!config.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let config = unsafe { config.read_unaligned() };
        let shape = unsafe { shape(&config) }?;
        let list = || (0..config.num_attrs as usize).map(|i| unsafe { config.attrs.add(i).read_unaligned() });
        if hook::captures(config.stream) {
            let attributes: Vec<CUlaunchAttribute> = list().collect();
            return unsafe { launch_or_capture(handle, shape, config.stream, &attributes, params, extra) };
        }
        unsafe { launch_or_capture(handle, shape, config.stream, &[], params, extra) }?;
        // Programmatic and launch completion events: at the latest moment that they may trigger at.
        for i in 0..config.num_attrs as usize {
            let attribute = unsafe { config.attrs.add(i).read_unaligned() };
            if matches!(attribute.id, 7 | 12) {
                handles::event(attribute.value[0])?.record(&current::stream(config.stream)?)?;
            }
        }
        Ok(())
    })
}

/// `CUDA_COOPERATIVE_LAUNCH_MULTI_DEVICE_NO_PRE_LAUNCH_SYNC` and `..._NO_POST_LAUNCH_SYNC`.
const NO_PRE_SYNC: u32 = 1;
const NO_POST_SYNC: u32 = 2;

/// A cooperative launch on each of several devices. None of them begins before what is in all of their streams so far
/// has ended, and nothing behind them begins before all have.
pub unsafe fn cuLaunchCooperativeKernelMultiDevice(list: *mut c_void, count: u32, flags: u32) -> CUresult {
    status(|| {
        current::healthy()?;
        let captures =
            |i: usize| unsafe { hook::captures(list.cast::<CudaLaunchParams>().add(i).read_unaligned().stream) };
        let any = !list.is_null() && (0..count as usize).any(captures);
        ensure(!any, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)?;
        ensure(!list.is_null() && count > 0 && flags <= (NO_PRE_SYNC | NO_POST_SYNC), CUDA_ERROR_INVALID_VALUE)?;
        let launches: Vec<CudaLaunchParams> =
            (0..count as usize).map(|i| unsafe { list.cast::<CudaLaunchParams>().add(i).read_unaligned() }).collect();
        let mut streams = Vec::new();
        for launch in &launches {
            let Object::Stream(stream) = handles::get(launch.stream)? else { return Err(CUDA_ERROR_INVALID_HANDLE) };
            streams.push((stream.context()?, stream));
        }
        let same = |l: &CudaLaunchParams| (l.grid, l.block, l.shared_bytes);
        ensure(launches.iter().all(|l| same(l) == same(&launches[0])), CUDA_ERROR_INVALID_VALUE)?;
        let mut devices: Vec<usize> = streams.iter().map(|(context, _)| context.device.ordinal).collect();
        devices.sort_unstable();
        devices.dedup();
        ensure(devices.len() == launches.len(), CUDA_ERROR_INVALID_DEVICE)?;
        if flags & NO_PRE_SYNC == 0 {
            meet(&streams)?;
        }
        for (launch, (context, stream)) in launches.iter().zip(&streams) {
            let shape = Shape {
                grid: launch.grid,
                block: launch.block,
                shared: launch.shared_bytes,
                cooperative: true,
                cluster: [1; 3],
            };
            let params = launch.params.cast();
            unsafe { launch_in(context, stream, launch.function, shape, params, std::ptr::null_mut()) }?;
        }
        if flags & NO_POST_SYNC == 0 {
            meet(&streams)?;
        }
        Ok(())
    })
}

/// Has each stream wait for what is in all of them.
fn meet(streams: &[(Arc<Context>, Arc<Stream>)]) -> Result<()> {
    let marks: Vec<Mark> = streams.iter().map(|(_, stream)| stream.last()).collect();
    for (_, stream) in streams {
        let marks = marks.clone();
        stream.submit(move |_| {
            marks.iter().for_each(Mark::wait);
            Ok(())
        })?;
    }
    Ok(())
}

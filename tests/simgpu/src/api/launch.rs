//! Launches.

use std::ffi::c_void;
use std::sync::{Arc, PoisonError};

use rekindle_cuda_abi::arguments::In;
use rekindle_cuda_abi::launch::{
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
    CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT, CU_LAUNCH_ATTRIBUTE_PRIORITY, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT,
    LegacyLaunch,
};
use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CUDA_SUCCESS, CUfunction, CUlaunchAttribute, CUlaunchAttributeValue,
    CUlaunchConfig, CUresult, CUstream, CudaLaunchParams,
};

use rekindle_graphs::{Kernel, hook};

use crate::context::Context;
use crate::current;
use crate::event::Event;
use crate::execution::launch::{Shape, gather, launch, launch_in};
use crate::handles;
use crate::library::function_in;
use crate::order::Mark;
use crate::status::{Result, ensure, status, values};
use crate::stream::Stream;

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
    let shape = Shape::plain([grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared);
    // SAFETY: the caller's parameters are as `cuda.h` describes them.
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
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    let shape = Shape { cooperative: true, ..Shape::plain(grid, block, shared) };
    // SAFETY: the caller's parameters are as `cuda.h` describes them.
    status(|| unsafe { launch_or_capture(handle, shape, stream, &[], params, std::ptr::null_mut()) })
}

/// Launches a kernel, or has a capture take it.
///
/// # Safety
///
/// `params` and `extra` must be null or what `cuLaunchKernel` describes.
unsafe fn launch_or_capture(
    handle: CUfunction,
    shape: Shape,
    stream: CUstream,
    attributes: &[CUlaunchAttribute],
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result<()> {
    let captured = hook::launch(stream, || {
        let context = current::healthy()?;
        let function = function_in(&context, handle)?;
        let layout = function.kernel.params.iter().map(|p| (p.offset, p.size)).collect();
        // SAFETY: the caller's promise.
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
            kernel.attributes.insert(CU_LAUNCH_ATTRIBUTE_COOPERATIVE, CUlaunchAttributeValue::of_word(1));
        }
        Ok(kernel)
    });
    // Read before the launch: the kernel may break the context.
    let (block, shared) = (shape.block, shape.shared);
    let found = current::healthy().and_then(|context| {
        let function = function_in(&context, handle)?;
        // SAFETY: the caller's promise.
        let parameters = unsafe { gather(&function, params, extra) }?;
        Ok((parameters, function))
    });
    match captured {
        Some(code) => ensure(code == CUDA_SUCCESS, code),
        // SAFETY: the caller's promise.
        None => unsafe { launch(handle, shape, stream, params, extra) },
    }?;
    // The launch overwrites the settings that separate calls made (cuda.h at `cuLaunch` and `cuLaunchCooperativeKernel`).
    if let Ok((parameters, function)) = found {
        *function.legacy.lock().unwrap_or_else(PoisonError::into_inner) = LegacyLaunch::new(block, shared, parameters);
    }
    Ok(())
}

/// The shape that a configuration with attributes describes.
///
/// # Safety
///
/// The configuration must be one that a caller has passed, whose attributes are still there.
pub(super) unsafe fn shape(config: &CUlaunchConfig) -> Result<Shape> {
    let mut shape = Shape::plain(config.grid, config.block, config.shared_bytes);
    // SAFETY: the caller's promise.
    for attribute in unsafe { config.attributes() }? {
        let value = CUlaunchAttributeValue(attribute.value);
        match attribute.id {
            // Hints: caching, ways of waiting, priorities, memory domains, carveouts.
            0 | 1 | 3 | 5 | CU_LAUNCH_ATTRIBUTE_PRIORITY | 9 | 10 | 11 | 14 => {}
            CU_LAUNCH_ATTRIBUTE_COOPERATIVE => shape.cooperative = value.word() != 0,
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION => shape.cluster = value.cluster(),
            // A kernel may begin before its predecessor has ended, but need not.
            6 => {}
            // Events are recorded behind the kernel, see `cuLaunchKernelEx`.
            id if is_event(id) => drop(handles::get::<Event>(value.0[0])?),
            16 => {}
            _ => return Err(CUDA_ERROR_NOT_SUPPORTED),
        }
    }
    shape.check_clusters()?;
    Ok(shape)
}

/// Whether an attribute is an event that a launch records.
fn is_event(attribute: u32) -> bool {
    matches!(attribute, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT | CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
}

pub unsafe fn cuLaunchKernelEx(
    config: In<CUlaunchConfig>,
    handle: CUfunction,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    status(|| {
        let config = config.read()?;
        // SAFETY: the caller has just passed it.
        let (shape, attributes) = unsafe { (shape(&config)?, config.attributes()?) };
        let captures = hook::captures(config.stream);
        let taken = if captures { attributes } else { &[] };
        // SAFETY: the caller's parameters are as `cuda.h` describes them.
        unsafe { launch_or_capture(handle, shape, config.stream, taken, params, extra) }?;
        if captures {
            return Ok(());
        }
        // Programmatic and launch completion events trigger at the latest moment that is allowed.
        for attribute in attributes.iter().filter(|it| is_event(it.id)) {
            handles::get::<Event>(attribute.value[0])?.record(&current::stream(config.stream)?)?;
        }
        Ok(())
    })
}

/// `CUDA_COOPERATIVE_LAUNCH_MULTI_DEVICE_NO_PRE_LAUNCH_SYNC` and `..._NO_POST_LAUNCH_SYNC`.
const NO_PRE_SYNC: u32 = 1;
const NO_POST_SYNC: u32 = 2;

/// A cooperative launch on each of several devices. None of them begins before all earlier work in their streams has
/// ended, and no later work begins before all of them have.
pub unsafe fn cuLaunchCooperativeKernelMultiDevice(list: *mut c_void, count: u32, flags: u32) -> CUresult {
    status(|| {
        current::healthy()?;
        // SAFETY: null, or as many launches as the caller says.
        let launches: Vec<CudaLaunchParams> = unsafe { values(list.cast(), count as usize) }?;
        ensure(!launches.iter().any(|launch| hook::captures(launch.stream)), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)?;
        ensure(!launches.is_empty() && flags <= (NO_PRE_SYNC | NO_POST_SYNC), CUDA_ERROR_INVALID_VALUE)?;
        let mut streams = Vec::new();
        for launch in &launches {
            let stream = handles::get::<Stream>(launch.stream)?;
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
            let shape = Shape { cooperative: true, ..Shape::plain(launch.grid, launch.block, launch.shared_bytes) };
            let params = launch.params.cast();
            // SAFETY: the caller's parameters are as `cuda.h` describes them.
            unsafe { launch_in(context, stream, launch.function, shape, (params, std::ptr::null_mut()), None) }?;
        }
        if flags & NO_POST_SYNC == 0 {
            meet(&streams)?;
        }
        Ok(())
    })
}

/// Has each stream wait for the present commands of all of them.
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

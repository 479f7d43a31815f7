//! Launches by the calls from before CUDA 4, which set the parts of a launch one by one, and cooperative launches on
//! several devices.

use std::ffi::c_void;
use std::sync::atomic::Ordering::Relaxed;

use rekindle_cuda_abi::launch::{LegacyLaunch, MAX_PARAMETERS, extra};
use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Writer;
use rekindle_wire::command::{COOPERATIVE, Kind, LAUNCH_ON_DEVICES, Launch, LaunchOnDevices};

use super::{check, code};
use crate::call::Call;
use crate::operations::launch::{Origin, gather, launch, launchable};
use crate::state::client;

/// Changes what is set of a function's next launch.
fn set(function: CUfunction, change: impl FnOnce(&mut LegacyLaunch) -> Result<(), CUresult>) -> CUresult {
    code(launchable(function).and_then(|known| {
        let mut legacy = known.legacy.lock().map_err(|_| CUDA_ERROR_UNKNOWN)?;
        known.has_legacy.store(true, Relaxed);
        change(&mut legacy)
    }))
}

pub(crate) unsafe fn cuFuncSetBlockShape(function: CUfunction, x: i32, y: i32, z: i32) -> CUresult {
    set(function, |legacy| legacy.set_block([x, y, z]))
}

pub(crate) unsafe fn cuFuncSetSharedSize(function: CUfunction, bytes: u32) -> CUresult {
    set(function, |legacy| {
        legacy.shared_bytes = bytes;
        Ok(())
    })
}

pub(crate) unsafe fn cuParamSetSize(function: CUfunction, bytes: u32) -> CUresult {
    set(function, |legacy| legacy.set_size(bytes))
}

pub(crate) unsafe fn cuParamSeti(function: CUfunction, offset: i32, value: u32) -> CUresult {
    set(function, |legacy| legacy.set_bytes(offset, &value.to_ne_bytes()))
}

pub(crate) unsafe fn cuParamSetf(function: CUfunction, offset: i32, value: f32) -> CUresult {
    set(function, |legacy| legacy.set_bytes(offset, &value.to_ne_bytes()))
}

pub(crate) unsafe fn cuParamSetv(function: CUfunction, offset: i32, value: *mut c_void, bytes: u32) -> CUresult {
    if value.is_null() || bytes as usize > MAX_PARAMETERS {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, so that many bytes by the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts(value.cast(), bytes as usize) };
    set(function, |legacy| legacy.set_bytes(offset, bytes))
}

pub(crate) unsafe fn cuLaunchGridAsync(function: CUfunction, width: i32, height: i32, stream: CUstream) -> CUresult {
    let launched = launchable(function).and_then(|known| {
        let [width, height] = [width, height].map(|n| u32::try_from(n).unwrap_or(0));
        let (what, parameters) = {
            let legacy = known.legacy.lock().map_err(|_| CUDA_ERROR_UNKNOWN)?;
            let what = Launch {
                function,
                grid: [width, height, 1],
                block: legacy.block,
                shared_bytes: legacy.shared_bytes,
                flags: 0,
                stream,
                attributes: &[],
                parameters: &[],
            };
            (what, legacy.parameters())
        };
        let mut size = 0;
        let mut extra = extra(&parameters, &mut size);
        // SAFETY: the array announces a buffer and its size, which live through the call.
        unsafe { launch(what, std::ptr::null_mut(), extra.as_mut_ptr(), Origin::Parts) }
    });
    code(launched)
}

pub(crate) unsafe fn cuLaunchGrid(function: CUfunction, width: i32, height: i32) -> CUresult {
    // SAFETY: no pointers.
    unsafe { cuLaunchGridAsync(function, width, height, 0) }
}

pub(crate) unsafe fn cuLaunch(function: CUfunction) -> CUresult {
    // SAFETY: no pointers.
    unsafe { cuLaunchGridAsync(function, 1, 1, 0) }
}

/// Always waits, because the driver reports errors of such launches at once.
pub(crate) unsafe fn cuLaunchCooperativeKernelMultiDevice(list: *mut c_void, count: u32, flags: u32) -> CUresult {
    let launch_all = || {
        client::get()?.contexts.current()?;
        if list.is_null() || count == 0 || count as usize > rekindle_wire::window::MAX_DEVICES {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut call = Call::in_context(LAUNCH_ON_DEVICES)?;
        let mut launches = Vec::new();
        for i in 0..count as usize {
            // SAFETY: the array holds `count` launches, by the caller's promise.
            let one = unsafe { list.cast::<CudaLaunchParams>().add(i).read() };
            // The default streams are none of several devices.
            if !Kind::Stream.owns(one.stream) {
                return Err(CUDA_ERROR_INVALID_HANDLE);
            }
            if rekindle_graphs::hook::captures(one.stream) {
                return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
            }
            let function = launchable(one.function)?;
            let mut parameters = Vec::new();
            // SAFETY: parameters as for any launch, by the caller's promise.
            unsafe { gather(&function, one.params, std::ptr::null_mut(), &mut parameters) }?;
            let mut writer = Writer::new();
            Launch {
                function: one.function,
                grid: one.grid,
                block: one.block,
                shared_bytes: one.shared_bytes,
                flags: COOPERATIVE,
                stream: one.stream,
                attributes: &[],
                parameters: &parameters,
            }
            .write(&mut writer);
            launches.push(writer.into_bytes());
        }
        let launches = launches.iter().map(Vec::as_slice).collect();
        call.put(&LaunchOnDevices { flags, launches });
        check(call.wait().0)
    };
    code(launch_all())
}

//! Primary contexts: one for each device, counted here; the worker has had it ready since before the process was born.

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{CONTEXT_RELEASE, CONTEXT_RESET, CONTEXT_RETAIN, EndContext, MakeContext};

use super::{check, code, put};
use crate::call::Call;
use crate::state::client::{self, Client};
use crate::state::contexts::{Context, Contexts, Primary};

pub(crate) unsafe fn cuDevicePrimaryCtxRetain(pctx: *mut CUcontext, dev: CUdevice) -> CUresult {
    code(client::get().and_then(|client| {
        let handle = retain(client, client.devices.number(dev)?)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(pctx, handle) }
    }))
}

/// Retains a device's primary context.
fn retain(client: &'static Client, device: usize) -> Result<CUcontext, CUresult> {
    let retained = client.contexts.with_primary(device, |primary| {
        // The driver returns an active context even if it is broken, but activates none after a sticky error.
        if client.contexts.get(Contexts::primary_handle(device)).is_none() {
            client.connection.sticky_error()?;
            activate(client, device, *primary)?;
        }
        primary.retained += 1;
        Ok(Contexts::primary_handle(device))
    });
    retained.ok_or(CUDA_ERROR_UNKNOWN)?
}

/// A context for what belongs to all of them, where the program has none current: the first primary context that is active, or that
/// of the first device, which stays retained.
pub(super) fn any(client: &'static Client) -> Result<CUcontext, CUresult> {
    let all = (0..client.devices.count()).map(Contexts::primary_handle);
    match all.into_iter().find(|handle| client.contexts.get(*handle).is_some()) {
        Some(active) => Ok(active),
        None => retain(client, client.devices.number(0)?),
    }
}

fn activate(client: &'static Client, device: usize, primary: Primary) -> Result<(), CUresult> {
    let handle = Contexts::primary_handle(device);
    let mut call = Call::unchecked(client, CONTEXT_RETAIN, 0);
    call.put(&MakeContext { context: handle, device: device as u64, flags: super::context::for_worker(primary.flags) });
    let (result, mut reply) = call.wait();
    check(result)?;
    let api_version = reply.word().unwrap_or(u64::from(client.devices.api_version())) as u32;
    let context =
        Context { device, flags: primary.flags, api_version, id: device as u64 + 1, green: None, attached: 0 };
    client.contexts.insert(handle, context);
    Ok(())
}

pub(crate) unsafe fn cuDevicePrimaryCtxRelease_v2(dev: CUdevice) -> CUresult {
    code(client::get().and_then(|client| {
        let device = client.devices.number(dev)?;
        client
            .contexts
            .with_primary(device, |primary| match primary.retained {
                0 => Err(CUDA_ERROR_INVALID_CONTEXT),
                1 => {
                    primary.retained = 0;
                    release(client, device)
                }
                _ => {
                    primary.retained -= 1;
                    Ok(())
                }
            })
            .ok_or(CUDA_ERROR_UNKNOWN)?
    }))
}

/// The first version takes one release too many for nothing.
pub(crate) unsafe fn cuDevicePrimaryCtxRelease(dev: CUdevice) -> CUresult {
    // SAFETY: no pointers.
    match unsafe { cuDevicePrimaryCtxRelease_v2(dev) } {
        CUDA_ERROR_INVALID_CONTEXT => CUDA_SUCCESS,
        result => result,
    }
}

pub(crate) unsafe fn cuDevicePrimaryCtxReset_v2(dev: CUdevice) -> CUresult {
    code(client::get().and_then(|client| {
        let device = client.devices.number(dev)?;
        client
            .contexts
            .with_primary(device, |primary| {
                if client.contexts.get(Contexts::primary_handle(device)).is_none() {
                    return Ok(());
                }
                if client.connection.sticky_error().is_err() {
                    // The error stays, but the context is destroyed.
                    rekindle_cuda_abi::private::cls_reset(Contexts::primary_handle(device));
                    client.contexts.green_contexts(Contexts::primary_handle(device)).into_iter().for_each(|green| {
                        super::context::forget(client, green);
                    });
                    gone(client, device);
                    primary.retained = 0;
                    return Ok(());
                }
                for green in client.contexts.green_contexts(Contexts::primary_handle(device)) {
                    // Ends without the release that `cuGreenCtxDestroy` would make.
                    super::context::end_green(client, green)?;
                    primary.retained = primary.retained.saturating_sub(1);
                }
                reset(client, device)?;
                // A retained context comes back empty at once; the driver makes it anew at its next use.
                if primary.retained > 0 { activate(client, device, *primary) } else { Ok(()) }
            })
            .ok_or(CUDA_ERROR_UNKNOWN)?
    }))
}

pub(crate) unsafe fn cuDevicePrimaryCtxReset(dev: CUdevice) -> CUresult {
    // SAFETY: no pointers.
    unsafe { cuDevicePrimaryCtxReset_v2(dev) }
}

/// Releases a primary context whose count has reached zero.
fn release(client: &'static Client, device: usize) -> Result<(), CUresult> {
    let handle = Contexts::primary_handle(device);
    rekindle_cuda_abi::private::cls_reset(handle);
    let _one = client.variables.change();
    let mut call = Call::unchecked(client, CONTEXT_RELEASE, handle);
    call.put(&EndContext { context: handle });
    // Pinned memory and managed variables must not be unmapped here before the worker has let them go.
    check(if client.memory.has_pinned(handle) || client.variables.has_any() { call.wait().0 } else { call.send() })?;
    // They end with it in the worker.
    client.contexts.green_contexts(handle).into_iter().for_each(|green| super::context::forget(client, green));
    super::context::forget(client, handle);
    Ok(())
}

/// Drops everything in a primary context, here and in the worker, and waits until that is done.
fn reset(client: &'static Client, device: usize) -> Result<(), CUresult> {
    let handle = Contexts::primary_handle(device);
    rekindle_cuda_abi::private::cls_reset(handle);
    let _one = client.variables.change();
    let mut call = Call::unchecked(client, CONTEXT_RESET, handle);
    call.put(&EndContext { context: handle });
    check(call.wait().0)?;
    gone(client, device);
    Ok(())
}

/// Forgets everything in a primary context.
fn gone(client: &Client, device: usize) {
    client.memory.forget_pools(device);
    super::pool_sharing::forget_device(client, device);
    super::context::forget(client, Contexts::primary_handle(device));
}

pub(crate) unsafe fn cuDevicePrimaryCtxSetFlags_v2(dev: CUdevice, flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        let device = client.devices.number(dev)?;
        super::context::check_flags(flags)?;
        client.contexts.with_primary(device, |p| p.flags = flags).ok_or(CUDA_ERROR_UNKNOWN)
    }))
}

pub(crate) unsafe fn cuDevicePrimaryCtxSetFlags(dev: CUdevice, flags: u32) -> CUresult {
    // SAFETY: no pointers.
    unsafe { cuDevicePrimaryCtxSetFlags_v2(dev, flags) }
}

pub(crate) unsafe fn cuDevicePrimaryCtxGetState(dev: CUdevice, flags: *mut u32, active: *mut i32) -> CUresult {
    code(client::get().and_then(|client| {
        let primary = client.contexts.primary(client.devices.number(dev)?);
        // SAFETY: the caller's promise by cuda.h.
        unsafe {
            put(flags, primary.flags)?;
            put(active, i32::from(primary.retained > 0))
        }
    }))
}

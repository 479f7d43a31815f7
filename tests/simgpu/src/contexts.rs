//! The life of contexts: primary ones, those that programs create, and their end.
//!
//! ```text
//!   primary   one per device, counted by retain and release, its handle outlives resets
//!   created   by cuCtxCreate, ended by cuCtxDestroy
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::private;
use rekindle_cuda_abi::types::CUDA_ERROR_CONTEXT_IS_DESTROYED;

use crate::config::{MAX_DEVICES, config};
use crate::context::Context;
use crate::device::{Device, devices};
use crate::handles;
use crate::memory::{managed, space};
use crate::status::Result;
use crate::streams;

/// The state of a device's primary context, whose handle is the device's ([`Device::primary`]).
#[derive(Debug)]
pub(crate) struct Primary {
    /// How often it has been retained.
    pub(crate) retained: usize,
    /// The flags it has or will be created with.
    pub(crate) flags: u32,
    /// The context while it is active.
    pub(crate) active: Option<Arc<Context>>,
}

/// The state of a device's primary context.
pub(crate) fn primary(device: &Device) -> MutexGuard<'static, Primary> {
    const NEW: Primary = Primary { retained: 0, flags: 0, active: None };
    static PRIMARIES: [Mutex<Primary>; MAX_DEVICES] = [const { Mutex::new(NEW) }; MAX_DEVICES];
    PRIMARIES[device.ordinal].lock().unwrap_or_else(PoisonError::into_inner)
}

/// A new context on a device, under that handle, with its default streams. It takes memory of the device, if the configuration
/// says so.
pub(crate) fn create(handle: u64, device: &'static Device, flags: u32) -> Result<Arc<Context>> {
    device.memory.charge(config().context_memory)?;
    let context = Arc::new(Context::new(handle, device, flags));
    streams::open(&context);
    Ok(context)
}

/// Retains a device's primary context, which is created where it is not active.
pub(crate) fn retain(device: &'static Device) -> Result<Arc<Context>> {
    let mut primary = primary(device);
    let context = match &primary.active {
        Some(context) => context.clone(),
        None => {
            crate::context::process_is_well()?;
            create(device.primary, device, primary.flags)?
        }
    };
    primary.active = Some(context.clone());
    primary.retained += 1;
    Ok(context)
}

/// Ends a device's primary context, if it is active. It stays active until it has ended: destructors of libraries' data still
/// use it.
pub(crate) fn end_primary(device: &Device) {
    let Some(context) = primary(device).active.clone() else { return };
    end(&context);
    let mut primary = primary(device);
    if primary.active.as_ref().is_some_and(|active| active.id == context.id) {
        primary.active = None;
        primary.flags = 0;
    }
}

/// Ends a context: waits for its work, and removes all that belongs to it.
pub(crate) fn end(context: &Context) {
    rekindle_graphs::hook::context_gone(context.handle);
    private::cls_reset(context.handle);
    let _ = context.synchronize();
    context.cancel();
    handles::end_context(context.handle, context.id);
    for region in space::remove_all(|region| region.context == context.handle) {
        managed::release(&region);
        if let Some(device) = devices().get(region.device) {
            device.reclaim(&region);
        }
    }
    context.remove_print_buffer();
    context.fail(CUDA_ERROR_CONTEXT_IS_DESTROYED);
    streams::close(context);
    context.device.memory.release(config().context_memory);
}

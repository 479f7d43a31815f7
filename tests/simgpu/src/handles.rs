//! Handles: numbers that stand for objects. Nobody dereferences them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use rekindle_cuda_abi::types::CUDA_ERROR_INVALID_HANDLE;

use crate::api::linker::Link;
use crate::array::{Array, Mipmapped};
use crate::context::Context;
use crate::event::Event;
use crate::library::{Kernel, Library};
use crate::module::{Function, Module};
use crate::status::Result;
use crate::stream::Stream;

/// What a handle stands for.
#[derive(Clone, Debug)]
pub(crate) enum Object {
    /// A context made with `cuCtxCreate`.
    Context(Arc<Context>),
    /// A stream made with `cuStreamCreate`.
    Stream(Arc<Stream>),
    /// An event.
    Event(Arc<Event>),
    /// A module.
    Module(Arc<Module>),
    /// A function of a module.
    Function(Arc<Function>),
    /// A library.
    Library(Arc<Library>),
    /// A kernel of a library.
    Kernel(Arc<Kernel>),
    /// An array.
    Array(Arc<Array>),
    /// A mipmapped array.
    Mipmapped(Arc<Mipmapped>),
    /// A linker.
    Link(Arc<Link>),
}

static OBJECTS: RwLock<Option<HashMap<u64, Object>>> = RwLock::new(None);

/// A number that no handle has had before. Looks like an address in nobody's memory.
pub(crate) fn next() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0x0b00_0000_0000_0010);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

/// Makes a handle stand for an object.
pub(crate) fn insert(handle: u64, object: Object) {
    let mut objects = OBJECTS.write().unwrap_or_else(PoisonError::into_inner);
    objects.get_or_insert_default().insert(handle, object);
}

/// Ends a handle.
pub(crate) fn remove(handle: u64) {
    let mut objects = OBJECTS.write().unwrap_or_else(PoisonError::into_inner);
    let gone = objects.as_mut().and_then(|o| o.remove(&handle));
    drop(objects);
    // Dropping an object may end other handles, so not under the lock.
    drop(gone);
}

/// Ends every handle that `gone` says.
pub(crate) fn remove_all(gone: impl Fn(&Object) -> bool) {
    let mut objects = OBJECTS.write().unwrap_or_else(PoisonError::into_inner);
    let Some(map) = objects.as_mut() else { return };
    let removed: Vec<Object> = map.extract_if(|_, object| gone(object)).map(|(_, object)| object).collect();
    drop(objects);
    drop(removed);
}

/// What a handle stands for.
pub(crate) fn get(handle: u64) -> Result<Object> {
    let objects = OBJECTS.read().unwrap_or_else(PoisonError::into_inner);
    objects.as_ref().and_then(|o| o.get(&handle).cloned()).ok_or(CUDA_ERROR_INVALID_HANDLE)
}

/// Every object there is.
pub(crate) fn all() -> Vec<Object> {
    let objects = OBJECTS.read().unwrap_or_else(PoisonError::into_inner);
    objects.as_ref().map(|o| o.values().cloned().collect()).unwrap_or_default()
}

macro_rules! getter {
    ($(#[$doc:meta])* $name:ident, $kind:ident) => {
        $(#[$doc])*
        pub(crate) fn $name(handle: u64) -> Result<Arc<$kind>> {
            match get(handle)? {
                Object::$kind(object) => Ok(object),
                _ => Err(CUDA_ERROR_INVALID_HANDLE),
            }
        }
    };
}

getter!(
    /// The event that a handle stands for.
    event,
    Event
);
getter!(
    /// The module that a handle stands for.
    module,
    Module
);
getter!(
    /// The library that a handle stands for.
    library,
    Library
);
getter!(
    /// The array that a handle stands for.
    array,
    Array
);
getter!(
    /// The mipmapped array that a handle stands for.
    mipmapped,
    Mipmapped
);

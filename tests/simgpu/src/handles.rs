//! Handles: numbers that stand for objects. A handle is not the address of anything.
//!
//! Each kind of object says by [`Object`] how it depends on contexts, so this file need not know the kinds.

use std::any::Any;
use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use rekindle_cuda_abi::types::CUDA_ERROR_INVALID_HANDLE;

use crate::status::Result;

/// A kind of object that handles stand for.
pub(crate) trait Object: Any + Debug + Send + Sync {
    /// Whether the object ends together with the context of that handle.
    fn belongs_to(&self, _context: u64) -> bool {
        false
    }

    /// Removes the object's data for the context of that id, which has ended.
    fn forget_context(&self, _id: u64) {}
}

static OBJECTS: RwLock<Option<HashMap<u64, Arc<dyn Object>>>> = RwLock::new(None);

/// A number that no handle has had before. It looks like an address at which there is no memory.
pub(crate) fn next() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0x0b00_0000_0000_0010);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

/// Makes a handle stand for an object.
pub(crate) fn insert(handle: u64, object: Arc<dyn Object>) {
    let mut objects = OBJECTS.write().unwrap_or_else(PoisonError::into_inner);
    objects.get_or_insert_default().insert(handle, object);
}

/// Ends a handle.
pub(crate) fn remove(handle: u64) {
    let mut objects = OBJECTS.write().unwrap_or_else(PoisonError::into_inner);
    let gone = objects.as_mut().and_then(|o| o.remove(&handle));
    drop(objects);
    // Dropped without the lock, since dropping an object may end other handles.
    drop(gone);
}

/// Ends the handles of objects that end together with a context, and removes the context's data from the others.
pub(crate) fn end_context(handle: u64, id: u64) {
    let mut objects = OBJECTS.write().unwrap_or_else(PoisonError::into_inner);
    let Some(map) = objects.as_mut() else { return };
    let removed: Vec<_> = map.extract_if(|_, object| object.belongs_to(handle)).collect();
    let left: Vec<_> = map.values().cloned().collect();
    drop(objects);
    drop(removed);
    left.iter().for_each(|object| object.forget_context(id));
}

fn as_kind<T: Object>(object: Arc<dyn Object>) -> Option<Arc<T>> {
    let object: Arc<dyn Any + Send + Sync> = object;
    object.downcast().ok()
}

/// The object that a handle stands for, whatever its kind.
pub(crate) fn any(handle: u64) -> Result<Arc<dyn Object>> {
    let objects = OBJECTS.read().unwrap_or_else(PoisonError::into_inner);
    objects.as_ref().and_then(|o| o.get(&handle).cloned()).ok_or(CUDA_ERROR_INVALID_HANDLE)
}

/// The object of a kind that a handle stands for.
pub(crate) fn get<T: Object>(handle: u64) -> Result<Arc<T>> {
    as_kind(any(handle)?).ok_or(CUDA_ERROR_INVALID_HANDLE)
}

/// Every object of a kind.
pub(crate) fn all<T: Object>() -> Vec<Arc<T>> {
    let objects = OBJECTS.read().unwrap_or_else(PoisonError::into_inner);
    objects.as_ref().map(|o| o.values().cloned().filter_map(as_kind).collect()).unwrap_or_default()
}

//! Storage per context (CLS): values that libraries keep with a context under a key of their own, and that are
//! destroyed with it.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::host::{Host, answer, put};
use crate::types::{CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE, CUcontext, CUresult};

type Destructor = unsafe extern "C" fn(CUcontext, *mut c_void, *mut c_void);

/// A key and a value of the caller's; to us, numbers.
#[derive(Clone, Copy)]
struct Entry {
    value: usize,
    destructor: Option<Destructor>,
}

type Contexts = HashMap<CUcontext, HashMap<usize, Entry>>;

static CONTEXTS: Mutex<Option<Contexts>> = Mutex::new(None);

fn contexts() -> MutexGuard<'static, Option<Contexts>> {
    // A panic cannot leave a map half changed that is only inserted into and removed from.
    CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// 0 and -1 name the current context.
fn resolve(host: &dyn Host, context: CUcontext) -> Result<CUcontext, CUresult> {
    let context = if context == 0 || context == u64::MAX { host.current_context()? } else { context };
    if context == 0 { Err(CUDA_ERROR_INVALID_CONTEXT) } else { Ok(context) }
}

pub(super) unsafe extern "C" fn put_value(
    context: CUcontext,
    key: *mut c_void,
    value: *mut c_void,
    destructor: Option<Destructor>,
) -> CUresult {
    answer(|host| {
        let context = resolve(host, context)?;
        let entry = Entry { value: value as usize, destructor };
        contexts().get_or_insert_default().entry(context).or_default().insert(key as usize, entry);
        Ok(())
    })
}

/// Removes a value without destroying it: who deletes it has it already.
pub(super) unsafe extern "C" fn delete_value(context: CUcontext, key: *mut c_void) -> CUresult {
    answer(|host| {
        let context = resolve(host, context)?;
        let mut contexts = contexts();
        let values = contexts.as_mut().and_then(|c| c.get_mut(&context)).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        values.remove(&(key as usize)).map(|_| ()).ok_or(CUDA_ERROR_INVALID_HANDLE)
    })
}

pub(super) unsafe extern "C" fn get_value(value: *mut *mut c_void, context: CUcontext, key: *mut c_void) -> CUresult {
    answer(|host| {
        let context = resolve(host, context)?;
        let found = contexts().as_ref().and_then(|c| c.get(&context)?.get(&(key as usize)).copied());
        let entry = found.ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        // SAFETY: the caller passes a pointer to write the value to.
        unsafe { put(value, entry.value as *mut c_void) }
    })
}

/// Ends what libraries keep with a context, when it is destroyed or reset: their destructors run here, on this
/// thread and without a lock, so they may come back into the tables.
pub fn reset_context(context: CUcontext) {
    // A destructor may store again; what it leaves the second time is dropped with the context.
    for _ in 0..2 {
        let Some(values) = contexts().as_mut().and_then(|c| c.remove(&context)) else { return };
        for (key, entry) in values {
            if let Some(destructor) = entry.destructor {
                // SAFETY: the function and its arguments are the caller's own, handed back as agreed, once.
                unsafe { destructor(context, key as *mut c_void, entry.value as *mut c_void) };
            }
        }
    }
    if let Some(contexts) = contexts().as_mut() {
        contexts.remove(&context);
    }
}

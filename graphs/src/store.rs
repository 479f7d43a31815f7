//! All that there is of graphs in a process, and the lock around it.

use std::sync::{LazyLock, Mutex, MutexGuard};

use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::capture::Captures;
use crate::driver::driver;
use crate::exec::Execs;
use crate::graphs::Graphs;

/// All graphs, executable graphs and captures.
#[derive(Default)]
pub(crate) struct Store {
    pub(crate) graphs: Graphs,
    pub(crate) execs: Execs,
    pub(crate) captures: Captures,
}

static STORE: LazyLock<Mutex<Store>> = LazyLock::new(Mutex::default);

fn lock() -> Result<MutexGuard<'static, Store>> {
    STORE.lock().map_err(|_| CUDA_ERROR_UNKNOWN)
}

/// Works on the store; then, without the lock, calls out as the work wants it.
pub(crate) fn with<T>(work: impl FnOnce(&mut Store) -> Result<T>) -> Result<T> {
    let mut store = lock()?;
    let result = work(&mut store);
    store.captures.publish();
    store.graphs.memory.publish();
    let destroyed = store.execs.take_destroyed();
    let released = store.graphs.memory.take_released();
    let destructors = store.graphs.users.take_destructors();
    drop(store);
    if let Ok(driver) = driver() {
        destroyed.into_iter().for_each(|exec| driver.destroy(exec));
        released.into_iter().for_each(|address| driver.release(address));
    }
    destructors.into_iter().for_each(|(function, data)| destroy_user_object(function, data));
    result
}

/// Calls the destructor of a user object that has lost its last reference.
fn destroy_user_object(function: u64, data: u64) {
    // SAFETY: the application gave the function with `cuUserObjectCreate`, to be called with this.
    unsafe {
        let destructor = std::mem::transmute::<usize, unsafe extern "C" fn(*mut std::ffi::c_void)>(function as usize);
        destructor(data as *mut std::ffi::c_void);
    }
}

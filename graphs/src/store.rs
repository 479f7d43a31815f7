//! Everything there is of graphs in a process, and the lock around it.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard};

use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::capture::Captures;
use crate::exec::Exec;
use crate::graph::Graph;
use crate::memory::Allocation;
use crate::user::UserObject;

/// What handles of graphs, nodes, executable graphs and user objects begin with: never an address.
const GRAPH: u64 = 0x21;
const NODE: u64 = 0x22;
const EXEC: u64 = 0x23;
const USER: u64 = 0x24;

/// All graphs, nodes, executable graphs, captures and user objects.
#[derive(Default)]
pub(crate) struct Store {
    last: u64,
    pub(crate) graphs: HashMap<CUgraph, Graph>,
    /// The graph of each node.
    pub(crate) nodes: HashMap<CUgraphNode, CUgraph>,
    pub(crate) execs: HashMap<CUgraphExec, Exec>,
    pub(crate) captures: Captures,
    pub(crate) memory: HashMap<CUdeviceptr, Allocation>,
    /// The most bytes of each device that were there, and the most of all.
    pub(crate) highest: HashMap<CUdevice, (u64, u64)>,
    pub(crate) users: HashMap<CUuserObject, UserObject>,
    /// What is to be done once the lock is no longer held.
    pub(crate) after: After,
}

/// What must not be done under the lock: it calls out.
#[derive(Default)]
pub(crate) struct After {
    /// Destructors of user objects, and what they take.
    pub(crate) destructors: Vec<(u64, u64)>,
    /// Memory of graphs that nobody uses any more.
    pub(crate) released: Vec<CUdeviceptr>,
    /// What the driver made of executable graphs that are no more.
    pub(crate) destroyed: Vec<u64>,
}

impl Store {
    fn fresh(&mut self, kind: u64) -> u64 {
        self.last += 1;
        kind << 48 | self.last
    }

    pub(crate) fn fresh_graph(&mut self) -> CUgraph {
        self.fresh(GRAPH)
    }

    pub(crate) fn fresh_node(&mut self) -> CUgraphNode {
        self.fresh(NODE)
    }

    pub(crate) fn fresh_exec(&mut self) -> CUgraphExec {
        self.fresh(EXEC)
    }

    pub(crate) fn fresh_user(&mut self) -> CUuserObject {
        self.fresh(USER)
    }

    pub(crate) fn graph(&self, graph: CUgraph) -> Result<&Graph> {
        self.graphs.get(&graph).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    pub(crate) fn graph_mut(&mut self, graph: CUgraph) -> Result<&mut Graph> {
        self.graphs.get_mut(&graph).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    pub(crate) fn exec_mut(&mut self, exec: CUgraphExec) -> Result<&mut Exec> {
        self.execs.get_mut(&exec).ok_or(CUDA_ERROR_INVALID_VALUE)
    }
}

static STORE: LazyLock<Mutex<Store>> = LazyLock::new(Mutex::default);

fn lock() -> Result<MutexGuard<'static, Store>> {
    STORE.lock().map_err(|_| CUDA_ERROR_UNKNOWN)
}

/// Works on the store; then calls out as the work wants it.
pub(crate) fn with<T>(work: impl FnOnce(&mut Store) -> Result<T>) -> Result<T> {
    let mut store = lock()?;
    let result = work(&mut store);
    store.captures.publish();
    store.publish_memory();
    let after = std::mem::take(&mut store.after);
    drop(store);
    after.run();
    result
}

impl After {
    fn run(self) {
        if let Ok(driver) = crate::driver::driver() {
            self.destroyed.into_iter().for_each(|exec| driver.destroy(exec));
            self.released.into_iter().for_each(|address| driver.release(address));
        }
        for (function, data) in self.destructors {
            // SAFETY: the application gave the function with `cuUserObjectCreate`, to be called with this.
            unsafe {
                let destructor =
                    std::mem::transmute::<usize, unsafe extern "C" fn(*mut std::ffi::c_void)>(function as usize);
                destructor(data as *mut std::ffi::c_void);
            }
        }
    }
}

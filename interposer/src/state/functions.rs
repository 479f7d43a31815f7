//! Kernels and functions: their parameter layouts, which a launch needs, and what launched before.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, RwLock};

use rekindle_cuda_abi::launch::{LegacyLaunch, size_of_parameters};

/// A function or kernel.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) name: CString,
    /// The module or library it came from.
    pub(crate) parent: u64,
    /// The context it belongs to; 0 for a kernel, which belongs to none.
    pub(crate) context: u64,
    /// Offset and size of each parameter, in bytes.
    pub(crate) params: Vec<(u32, u32)>,
    /// The furthest end of a parameter, in bytes.
    pub(crate) params_size: usize,
    /// A digest of the last configuration that was launched and answered with success. A launch that differs waits
    /// for its answer, because what is wrong with a configuration the driver says at once.
    pub(crate) proven: AtomicU64,
    /// A digest of the last block and shared memory that were found to be allowed, for nodes of graphs.
    pub(crate) checked: AtomicU64,
    /// The parts of a launch that calls from before CUDA 4 have set, for `cuLaunch` and the like.
    pub(crate) legacy: Mutex<LegacyLaunch>,
    /// Whether they have set anything: a launch by other calls then sets all of it.
    pub(crate) has_legacy: AtomicBool,
}

impl Function {
    pub(crate) fn new(name: CString, parent: u64, context: u64, params: Vec<(u32, u32)>) -> Self {
        let params_size = size_of_parameters(params.iter().copied());
        Self {
            name,
            parent,
            context,
            params,
            params_size,
            proven: AtomicU64::new(0),
            checked: AtomicU64::new(0),
            legacy: Mutex::default(),
            has_legacy: AtomicBool::new(false),
        }
    }

    /// A launch by another call overwrites what was set (cuda.h at `cuLaunch` and `cuLaunchCooperativeKernel`).
    pub(crate) fn overwrite_legacy(&self, block: [u32; 3], shared_bytes: u32, parameters: &[u8]) {
        if let Ok(mut legacy) = self.legacy.lock() {
            *legacy = LegacyLaunch::new(block, shared_bytes, parameters.to_vec());
        }
    }
}

/// All functions by handle.
#[derive(Default)]
pub(crate) struct Functions {
    by_handle: RwLock<HashMap<u64, Arc<Function>>>,
    /// The modules that libraries are in contexts: (library, context, module).
    modules: RwLock<Vec<(u64, u64, u64)>>,
}

impl Functions {
    pub(crate) fn get(&self, handle: u64) -> Option<Arc<Function>> {
        self.by_handle.read().ok()?.get(&handle).cloned()
    }

    pub(crate) fn insert(&self, handle: u64, function: Arc<Function>) {
        if let Ok(mut map) = self.by_handle.write() {
            map.insert(handle, function);
        }
    }

    /// A function of this parent that was looked up before: the driver returns the same handle again.
    pub(crate) fn find(&self, parent: u64, name: &std::ffi::CStr) -> Option<u64> {
        let map = self.by_handle.read().ok()?;
        map.iter().find(|(_, f)| f.parent == parent && f.name.as_c_str() == name).map(|(h, _)| *h)
    }

    /// The module that a library is in a context, if it was asked for before.
    pub(crate) fn module_of(&self, library: u64, context: u64) -> Option<u64> {
        let modules = self.modules.read().ok()?;
        modules.iter().find(|(l, c, _)| (*l, *c) == (library, context)).map(|(.., module)| *module)
    }

    /// The library and context of a module that is a library's.
    pub(crate) fn library_of(&self, module: u64) -> Option<(u64, u64)> {
        let modules = self.modules.read().ok()?;
        modules.iter().find(|(.., m)| *m == module).map(|(library, context, _)| (*library, *context))
    }

    /// Remembers a library's module; where another thread was first, its.
    pub(crate) fn add_module(&self, library: u64, context: u64, module: u64) -> u64 {
        let Ok(mut modules) = self.modules.write() else { return module };
        match modules.iter().find(|(l, c, _)| (*l, *c) == (library, context)) {
            Some((.., first)) => *first,
            None => {
                modules.push((library, context, module));
                module
            }
        }
    }

    /// Forgets the functions of a context that is gone. Kernels stay, but must prove themselves anew.
    pub(crate) fn forget_context(&self, context: u64) {
        if let Ok(mut modules) = self.modules.write() {
            modules.retain(|(_, c, _)| *c != context);
        }
        if let Ok(mut map) = self.by_handle.write() {
            map.retain(|_, f| f.context != context);
            map.values().for_each(|f| f.proven.store(0, std::sync::atomic::Ordering::Relaxed));
        }
    }

    /// Forgets the functions of a module or library that was unloaded, and those made from its kernels.
    pub(crate) fn forget(&self, parent: u64) {
        if let Ok(mut modules) = self.modules.write() {
            modules.retain(|(library, _, module)| *library != parent && *module != parent);
        }
        if let Ok(mut map) = self.by_handle.write() {
            let gone: Vec<u64> = map.iter().filter(|(_, f)| f.parent == parent).map(|(h, _)| *h).collect();
            map.retain(|h, f| f.parent != parent && !gone.contains(&f.parent) && !gone.contains(h));
        }
    }
}

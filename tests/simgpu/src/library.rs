//! Libraries: images that belong to no context, loaded into each where they are used.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_NOT_FOUND};

use crate::context::Context;
use crate::current;
use crate::device::devices;
use crate::handles::{self, Object};
use crate::image::Image;
use crate::module::{Function, Module, Settings};
use crate::status::Result;

/// A library.
#[derive(Debug)]
pub(crate) struct Library {
    /// Its handle.
    pub(crate) handle: u64,
    image: Arc<Image>,
    kernels: Vec<Arc<Kernel>>,
    /// The module in each context, by the context's id.
    instances: Mutex<HashMap<u64, Arc<Module>>>,
}

/// A kernel of a library.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// Its handle.
    pub(crate) handle: u64,
    /// The library's handle.
    pub(crate) library: u64,
    /// The kernel's declaration.
    pub(crate) declared: rekindle_ptx::Kernel,
    /// The target for which its image was made.
    pub(crate) target: u32,
    /// Its name as a C string.
    pub(crate) name: CString,
    /// The settings for each device.
    pub(crate) settings: Vec<Arc<Settings>>,
    of: Weak<Library>,
}

impl Library {
    /// Makes a library of an image.
    pub(crate) fn load(image: Arc<Image>) -> Arc<Self> {
        let handle = handles::next();
        let library = Arc::new_cyclic(|weak: &Weak<Self>| {
            let kernels = image.ptx.kernels().iter().map(|declared| {
                Arc::new(Kernel {
                    handle: handles::next(),
                    library: handle,
                    declared: declared.clone(),
                    target: image.target,
                    name: CString::new(declared.name.as_str()).unwrap_or_default(),
                    settings: devices().iter().map(|_| Arc::default()).collect(),
                    of: weak.clone(),
                })
            });
            Self { handle, kernels: kernels.collect(), image: image.clone(), instances: Mutex::default() }
        });
        handles::insert(handle, library.clone());
        for kernel in &library.kernels {
            handles::insert(kernel.handle, kernel.clone());
        }
        library
    }

    /// Unloads the library in every context.
    pub(crate) fn unload(&self) {
        handles::remove(self.handle);
        for kernel in &self.kernels {
            handles::remove(kernel.handle);
        }
        let instances = std::mem::take(&mut *self.instances());
        for module in instances.into_values() {
            if let Some(context) = module.context.upgrade() {
                let _ = context.synchronize();
            }
            module.unload();
        }
    }

    fn instances(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<Module>>> {
        self.instances.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The library's module in a context, loaded if it is not yet.
    pub(crate) fn module(&self, context: &Arc<Context>) -> Result<Arc<Module>> {
        let mut instances = self.instances();
        if let Some(module) = instances.get(&context.id) {
            return Ok(module.clone());
        }
        let device = context.device.ordinal;
        let module = Module::load(context, &self.image, true, |name| {
            let kernel = self.kernels.iter().find(|kernel| kernel.declared.name == name)?;
            kernel.settings.get(device).cloned()
        })?;
        instances.insert(context.id, module.clone());
        Ok(module)
    }

    /// Its kernels, in the order of the image.
    pub(crate) fn kernels(&self) -> &[Arc<Kernel>] {
        &self.kernels
    }

    /// The kernel of that name.
    pub(crate) fn kernel(&self, name: &str) -> Result<Arc<Kernel>> {
        let found = self.kernels.iter().find(|kernel| kernel.declared.name == name);
        found.cloned().ok_or(CUDA_ERROR_NOT_FOUND)
    }
}

impl Kernel {
    /// The kernel's function in a context.
    pub(crate) fn function(&self, context: &Arc<Context>) -> Result<Arc<Function>> {
        let library = self.of.upgrade().ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        library.module(context)?.function(&self.declared.name)
    }
}

impl Object for Library {
    fn forget_context(&self, id: u64) {
        self.instances().remove(&id);
    }
}

impl Object for Kernel {}

/// A function or a kernel: the runtime passes kernels in the place of functions.
pub(crate) enum Code {
    /// A function of a module.
    Function(Arc<Function>),
    /// A kernel of a library, which is a function in each context.
    Kernel(Arc<Kernel>),
}

/// The function or kernel that a handle stands for.
pub(crate) fn code(handle: u64) -> Result<Code> {
    match handles::get(handle) {
        Ok(function) => Ok(Code::Function(function)),
        Err(_) => handles::get(handle).map(Code::Kernel),
    }
}

/// The function that a handle means in a context.
pub(crate) fn function_in(context: &Arc<Context>, handle: u64) -> Result<Arc<Function>> {
    match code(handle)? {
        Code::Function(function) => Ok(function),
        Code::Kernel(kernel) => kernel.function(context),
    }
}

/// The function that a handle means in the current context.
pub(crate) fn function(handle: u64) -> Result<Arc<Function>> {
    match code(handle)? {
        Code::Function(function) => Ok(function),
        Code::Kernel(kernel) => kernel.function(&current::healthy()?),
    }
}

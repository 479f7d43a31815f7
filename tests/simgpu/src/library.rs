//! Libraries: images that belong to no context, loaded into each where they are used.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_NOT_FOUND};

use crate::context::Context;
use crate::current;
use crate::device::devices;
use crate::handles::{self, Object};
use crate::image::Image;
use crate::memory::managed;
use crate::module::{Function, Module, OfLibrary, Settings, Variable};
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
    managed: Mutex<Managed>,
}

/// The managed variables of a library, from the first need on.
#[derive(Debug, Default)]
struct Managed {
    variables: HashMap<String, Variable>,
    /// Whether those with addresses in their first content have it.
    filled: bool,
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
            let (instances, managed) = (Mutex::default(), Mutex::default());
            Self { handle, kernels: kernels.collect(), image: image.clone(), instances, managed }
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
        let managed = std::mem::take(&mut *self.managed());
        managed.variables.values().for_each(|variable| managed::release_variable(variable.address));
    }

    fn managed(&self) -> MutexGuard<'_, Managed> {
        self.managed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the library's managed variables, if that has not been done.
    fn with_memory(&self, managed: &mut Managed) -> Result<()> {
        for global in self.image.ptx.globals().iter().filter(|it| it.managed && !it.external) {
            if !managed.variables.contains_key(&global.name) {
                // They belong to no context.
                let variable = Variable::allocate_managed((0, 0), global)?;
                if global.relocations.is_empty() {
                    // SAFETY: the memory was just allocated for these bytes, and no code knows it.
                    unsafe {
                        let start = variable.address as *mut u8;
                        start.copy_from_nonoverlapping(global.init.as_ptr(), global.init.len());
                    }
                }
                managed.variables.insert(global.name.clone(), variable);
            }
        }
        Ok(())
    }

    /// The managed variable of that name. It is there before the library is in any context.
    pub(crate) fn managed_variable(&self, name: &str) -> Result<Variable> {
        let mut managed = self.managed();
        self.with_memory(&mut managed)?;
        managed.variables.get(name).copied().ok_or(CUDA_ERROR_NOT_FOUND)
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
        let mut managed = self.managed();
        self.with_memory(&mut managed)?;
        let of_library = OfLibrary { variables: &managed.variables, empty: !managed.filled };
        let module = Module::load(context, &self.image, Some(of_library), |name| {
            let kernel = self.kernels.iter().find(|kernel| kernel.declared.name == name)?;
            kernel.settings.get(device).cloned()
        })?;
        managed.filled = true;
        drop(managed);
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

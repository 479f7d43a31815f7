//! Modules: code loaded into a context, its variables in device memory, its functions.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rekindle_cuda_abi::launch::LegacyLaunch;
use rekindle_cuda_abi::types::{
    CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND,
    CUDA_ERROR_NOT_SUPPORTED,
};
use rekindle_ptx::{Kernel, Program, Space};

use crate::attributes::{MAX_BLOCK_THREADS, SHARED_DEFAULT, SHARED_OPT_IN};
use crate::config::{config, log};
use crate::context::Context;
use crate::handles::{self, Object};
use crate::image::Image;
use crate::memory::managed;
use crate::memory::space::{self, Kind};
use crate::status::{Result, ensure};

/// A module: an image of code with its variables in a context's memory.
#[derive(Debug)]
pub(crate) struct Module {
    /// Its handle.
    pub(crate) handle: u64,
    /// The context it was loaded into.
    pub(crate) context: Weak<Context>,
    /// Whether it belongs to a library, which alone can unload it.
    pub(crate) of_library: bool,
    functions: Vec<Arc<Function>>,
    code: Arc<Code>,
}

/// The code of a module. Under lazy loading the code gets addresses when one of its functions is first used: the lowest ones
/// that are free at that time in the context's blocks. So they depend on the modules that were loaded, used and unloaded
/// before.
#[derive(Debug)]
pub(crate) struct Code {
    context: Weak<Context>,
    image: Arc<Image>,
    globals: HashMap<String, Variable>,
    placed: Mutex<Option<Placed>>,
}

/// Code that has addresses.
#[derive(Clone, Debug)]
struct Placed {
    address: u64,
    program: Arc<Program>,
}

/// A variable of a module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variable {
    /// Its address.
    pub(crate) address: u64,
    /// Its size in bytes.
    pub(crate) size: u64,
    /// Whether it is in managed memory.
    pub(crate) managed: bool,
}

/// The managed variables of a library, which all of its modules have together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OfLibrary<'a> {
    /// By name.
    pub(crate) variables: &'a HashMap<String, Variable>,
    /// Whether they are yet to get first content that has addresses. What has none they have.
    pub(crate) empty: bool,
}

/// A function of a module that can be launched.
#[derive(Debug)]
pub(crate) struct Function {
    /// Its handle.
    pub(crate) handle: u64,
    /// The context its module was loaded into.
    pub(crate) context: Weak<Context>,
    /// The module's handle.
    pub(crate) module: u64,
    /// The code of its module.
    pub(crate) code: Arc<Code>,
    /// The function's declaration.
    pub(crate) kernel: Kernel,
    /// The target for which its image was made.
    pub(crate) target: u32,
    /// Its name as a C string.
    pub(crate) name: std::ffi::CString,
    /// The attributes that can be set.
    pub(crate) settings: Arc<Settings>,
    /// The settings for the next launch by `cuLaunch` and similar calls.
    pub(crate) legacy: Mutex<LegacyLaunch>,
}

/// The attributes that `cuFuncSetAttribute` sets, and `cuKernelSetAttribute` for kernels of libraries.
#[derive(Debug)]
pub(crate) struct Settings {
    /// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`, 0 if never set.
    max_dynamic_shared: AtomicI32,
    /// The attributes 9 to 15: hints, and clusters.
    others: [AtomicI32; 7],
}

impl Default for Settings {
    fn default() -> Self {
        // A carveout that was never set is -1.
        let mut others: [AtomicI32; 7] = Default::default();
        others[0] = AtomicI32::new(-1);
        Self { max_dynamic_shared: AtomicI32::new(0), others }
    }
}

const MAX_DYNAMIC_SHARED: u32 = 8;
const FIRST_OTHER: u32 = 9;

impl Module {
    /// Loads an image: places and fills its variables, but for a library's managed ones. A library's settings are those of `shared`,
    /// by function.
    pub(crate) fn load(
        context: &Arc<Context>,
        image: &Arc<Image>,
        of_library: Option<OfLibrary<'_>>,
        shared: impl Fn(&str) -> Option<Arc<Settings>>,
    ) -> Result<Arc<Self>> {
        let device = context.device;
        let mut globals = HashMap::new();
        for global in image.ptx.globals() {
            if global.external {
                log!("the variable {} is defined in no image", global.name);
                return Err(CUDA_ERROR_INVALID_IMAGE);
            }
            let size = global.size.max(1);
            if global.managed {
                let variable = match of_library {
                    Some(library) => *library.variables.get(&global.name).ok_or(CUDA_ERROR_INVALID_IMAGE)?,
                    None => Variable::allocate_managed((device.ordinal, context.handle), global)?,
                };
                globals.insert(global.name.clone(), variable);
                continue;
            }
            let address = device.allocate(context.handle, Kind::Code, size)?;
            if global.space == Space::Const {
                space::change(address, size, Kind::Code, |region| region.writers = 0);
            }
            globals.insert(global.name.clone(), Variable { address, size: global.size, managed: false });
        }
        for (name, size) in &image.of_machine_code {
            let address = device.allocate(context.handle, Kind::Code, (*size).max(1))?;
            // SAFETY: the memory was just allocated, and no other code knows it.
            unsafe { device.clear(Kind::Code, address, *size) };
            globals.insert(name.clone(), Variable { address, size: *size, managed: false });
        }
        let code = Code { context: Arc::downgrade(context), image: image.clone(), globals, placed: Mutex::default() };
        for global in image.ptx.globals() {
            let Some(variable) = code.globals.get(&global.name) else { continue };
            let has_content = |library: OfLibrary<'_>| global.relocations.is_empty() || !library.empty;
            if variable.managed && of_library.is_some_and(has_content) {
                continue;
            }
            let with_addresses;
            let bytes = if global.relocations.is_empty() {
                &global.init
            } else {
                // The image may hold a function's address, which must be known now.
                with_addresses = code.program()?.image(global);
                &with_addresses
            };
            let rest = global.size.saturating_sub(bytes.len() as u64);
            // SAFETY: the memory was just allocated for these bytes, and no other code knows it.
            unsafe {
                (variable.address as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                if variable.managed {
                    // Its memory is new, of zeros.
                    continue;
                }
                device.clear(Kind::Code, variable.address + bytes.len() as u64, rest);
            }
        }
        let code = Arc::new(code);
        let handle = handles::next();
        let functions = image.ptx.kernels().iter().map(|kernel| {
            Arc::new(Function {
                handle: handles::next(),
                context: Arc::downgrade(context),
                module: handle,
                code: code.clone(),
                kernel: kernel.clone(),
                target: image.target,
                name: std::ffi::CString::new(kernel.name.as_str()).unwrap_or_default(),
                settings: shared(&kernel.name).unwrap_or_default(),
                legacy: Mutex::default(),
            })
        });
        let functions: Vec<_> = functions.collect();
        let of_library = of_library.is_some();
        let module = Arc::new(Self { handle, context: Arc::downgrade(context), of_library, functions, code });
        handles::insert(handle, module.clone());
        for function in &module.functions {
            handles::insert(function.handle, function.clone());
        }
        Ok(module)
    }

    /// Unloads the module: ends its handles and frees its variables. The context must be idle.
    pub(crate) fn unload(&self) {
        handles::remove(self.handle);
        for function in &self.functions {
            handles::remove(function.handle);
        }
        let Ok(context) = self.context.upgrade().ok_or(()) else { return };
        let (managed, others): (Vec<Variable>, Vec<Variable>) = self.code.globals.values().partition(|it| it.managed);
        if !self.of_library {
            managed.iter().for_each(|variable| managed::release_variable(variable.address));
        }
        let variables = others.into_iter().map(|variable| variable.address);
        let code = self.code.placed().take().map(|placed| placed.address);
        for address in variables.chain(code) {
            if let Some(region) = space::remove(address, |r| r.kind == Kind::Code) {
                context.device.reclaim(&region);
            }
        }
    }

    /// Its functions, in the order of the image.
    pub(crate) fn functions(&self) -> &[Arc<Function>] {
        &self.functions
    }

    /// The function of that name.
    pub(crate) fn function(&self, name: &str) -> Result<Arc<Function>> {
        let found = self.functions.iter().find(|function| function.kernel.name == name);
        found.cloned().ok_or(CUDA_ERROR_NOT_FOUND)
    }

    /// The variable of that name. It need not be `.visible`: nvcc does not declare variables so that the runtime
    /// looks up by name.
    pub(crate) fn global(&self, name: &str) -> Result<Variable> {
        self.code.globals.get(name).copied().ok_or(CUDA_ERROR_NOT_FOUND)
    }
}

impl Variable {
    /// A managed variable, whose memory is zeros yet.
    pub(crate) fn allocate_managed(owner: (usize, u64), global: &rekindle_ptx::Global) -> Result<Self> {
        let address = managed::allocate_variable(owner, global.size.max(1))?;
        Ok(Self { address, size: global.size, managed: true })
    }
}

impl Object for Module {
    fn belongs_to(&self, context: u64) -> bool {
        self.context.upgrade().is_some_and(|it| it.handle == context)
    }
}

impl Object for Function {
    fn belongs_to(&self, context: u64) -> bool {
        self.context.upgrade().is_some_and(|it| it.handle == context)
    }
}

impl Code {
    fn placed(&self) -> MutexGuard<'_, Option<Placed>> {
        self.placed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The code at its addresses; the first call chooses them.
    pub(crate) fn program(&self) -> Result<Arc<Program>> {
        let mut placed = self.placed();
        if let Some(placed) = &*placed {
            return Ok(placed.program.clone());
        }
        let context = self.context.upgrade().ok_or(CUDA_ERROR_CONTEXT_IS_DESTROYED)?;
        let device = context.device;
        let size = self.image.code_bytes;
        let address = device.allocate(context.handle, Kind::Code, size)?;
        // Code can be called, and neither read nor written.
        space::change(address, size, Kind::Code, |region| (region.readers, region.writers) = (0, 0));
        let globals = &self.globals;
        let program = self.image.ptx.link(address + config().code_offset, &|name| globals.get(name).map(|g| g.address));
        let program = Arc::new(program.map_err(|error| {
            log!("a module cannot be linked: {error}");
            CUDA_ERROR_INVALID_IMAGE
        })?);
        *placed = Some(Placed { address, program: program.clone() });
        Ok(program)
    }

    /// Whether its kernels may print, or fail in assertions.
    pub(crate) fn prints(&self) -> bool {
        self.image.prints
    }

    /// Whether the code has addresses.
    pub(crate) fn is_placed(&self) -> bool {
        self.placed().is_some()
    }
}

impl Function {
    /// An attribute's value.
    pub(crate) fn attribute(&self, attribute: u32) -> Result<i32> {
        attribute_of(&self.kernel, self.target, &self.settings, attribute)
    }

    /// An error if the interpreter cannot run the function. This counts as a use of its code.
    pub(crate) fn ensure_supported(&self) -> Result<()> {
        self.code.program()?.supported(&self.kernel.name).map_err(|unsupported| {
            eprintln!("simgpu: a kernel cannot be run: {unsupported}");
            CUDA_ERROR_NOT_SUPPORTED
        })
    }

    /// The most dynamic shared memory it may be launched with.
    pub(crate) fn max_dynamic_shared(&self) -> u32 {
        self.settings.max_dynamic_shared(&self.kernel)
    }

    /// The most threads it may be launched with.
    pub(crate) fn max_threads(&self) -> u32 {
        max_threads(&self.kernel)
    }
}

/// The most threads a kernel may be launched with.
fn max_threads(kernel: &Kernel) -> u32 {
    let declared = kernel.required_threads.or(kernel.max_threads);
    declared.map_or(MAX_BLOCK_THREADS, |[x, y, z]| x.saturating_mul(y).saturating_mul(z).min(MAX_BLOCK_THREADS))
}

/// The number of registers that is reported for each kernel.
pub(crate) const REGISTERS: u32 = 32;

/// An attribute of a kernel, `CU_FUNC_ATTRIBUTE_*`.
pub(crate) fn attribute_of(kernel: &Kernel, target: u32, settings: &Settings, attribute: u32) -> Result<i32> {
    let (major, minor) = config().capability;
    let value = match attribute {
        0 => max_threads(kernel),
        1 => kernel.shared_bytes,
        2 => 0,
        3 => kernel.local_bytes,
        4 => REGISTERS,
        5 => target,
        6 => major * 10 + minor,
        7 => 0,
        MAX_DYNAMIC_SHARED => settings.max_dynamic_shared(kernel),
        FIRST_OTHER..=15 => return Ok(settings.others[(attribute - FIRST_OTHER) as usize].load(Ordering::Relaxed)),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    Ok(value as i32)
}

impl Settings {
    fn max_dynamic_shared(&self, kernel: &Kernel) -> u32 {
        match self.max_dynamic_shared.load(Ordering::Relaxed) {
            0 => SHARED_DEFAULT.saturating_sub(kernel.shared_bytes),
            set => set as u32,
        }
    }

    /// Sets an attribute of a kernel.
    pub(crate) fn set(&self, kernel: &Kernel, attribute: u32, value: i32) -> Result<()> {
        match attribute {
            MAX_DYNAMIC_SHARED => {
                let most = SHARED_OPT_IN.saturating_sub(kernel.shared_bytes) as i32;
                ensure((0..=most).contains(&value), CUDA_ERROR_INVALID_VALUE)?;
                self.max_dynamic_shared.store(value, Ordering::Relaxed);
            }
            FIRST_OTHER..=15 => {
                // The first of these is the carveout: a percentage, or -1 for the default.
                let good = attribute != FIRST_OTHER || (-1..=100).contains(&value);
                ensure(good, CUDA_ERROR_INVALID_VALUE)?;
                let place = (attribute - FIRST_OTHER) as usize;
                self.others[place].store(value, Ordering::Relaxed);
            }
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        Ok(())
    }
}

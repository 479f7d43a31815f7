//! Commands about code: modules, libraries, kernels, functions, globals.

use std::ffi::CStr;
use std::sync::Arc;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{
    self, CodePart, FindFunction, FindGlobal, Instantiate, KernelFunction, KernelNames, Kind, LibraryModule, LinkAdd,
    LoadCode, UnloadCode,
};
use rekindle_wire::layout::REPLY_BYTES;

use crate::resources::code_store::Image;
use crate::resources::globals::Placed;
use crate::resources::jit::JitOptions;
use crate::serve::executor::Executor;
use crate::session::objects::Object;
use crate::session::outcome::{Outcome, Refused};

/// The most bytes of code images that are kept for code that has been unloaded.
const MOST_UNLOADED_BYTES: usize = 1 << 30;

fn check(code: CUresult) -> Result<(), Refused> {
    if code == CUDA_SUCCESS { Ok(()) } else { Err(Refused::Code(code)) }
}

impl Executor {
    pub(crate) fn code_command(
        &mut self,
        call: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        match call {
            command::CODE_PART => self.code_part(args)?,
            command::MODULE_LOAD => return self.load(call, Kind::Module, args, reply),
            command::LIBRARY_LOAD => return self.load(call, Kind::Library, args, reply),
            command::CODE_LOG => return self.code.logs.fetch(self.header.thread, args, reply),
            command::MODULE_UNLOAD => self.unload(Kind::Module, args)?,
            command::LIBRARY_UNLOAD => self.unload(Kind::Library, args)?,
            command::MODULE_FUNCTION => self.module_function(args, reply)?,
            command::LIBRARY_KERNEL => self.library_kernel(args, reply)?,
            command::KERNEL_FUNCTION => self.kernel_function(args)?,
            command::LIBRARY_MODULE => self.library_module(args)?,
            command::MODULE_GLOBAL => self.global(Kind::Module, args, reply)?,
            command::LIBRARY_GLOBAL => self.global(Kind::Library, args, reply)?,
            command::KERNEL_NAMES => self.kernel_names(args, reply)?,
            _ => return self.link_command(call, args, reply),
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn link_command(&mut self, call: u16, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        let capability = self.capability();
        let (mut under_way, _, code) = self.parts();
        let (links, logs) = (&mut code.links, &mut code.logs);
        let result = match call {
            command::LINK_CREATE => links.create(&mut under_way, args)?,
            command::LINK_ADD => {
                let add = LinkAdd::read(args)?;
                let arrived = code.store.complete(add.image, capability);
                let image = arrived.map_err(|_| Refused::Code(CUDA_ERROR_INVALID_IMAGE))?;
                links.add(&mut under_way, logs, &add, args.all(), &image, reply)?
            }
            command::LINK_COMPLETE => links.complete(&mut under_way, logs, args, reply)?,
            command::LINK_OUTPUT => links.output(args, reply)?,
            command::LINK_DESTROY => links.destroy(&mut under_way, args)?,
            _ => return Err(Refused::UnknownCall(call)),
        };
        Ok(Outcome::Done(result))
    }

    fn code_part(&mut self, args: &mut Reader<'_>) -> Result<(), Refused> {
        let CodePart { image, offset, total, bytes } = CodePart::read(args)?;
        self.code.store.part(image, offset, total, bytes).map_err(|_| Refused::Code(CUDA_ERROR_INVALID_IMAGE))
    }

    /// The compute capability by which an image's entry is chosen. Devices of several kinds in one worker are not
    /// supported yet, which the worker says when it starts.
    pub(crate) fn capability(&self) -> (u32, u32) {
        self.memory.devices.first().map_or((0, 0), |d| d.capability)
    }

    fn load(&mut self, call: u16, kind: Kind, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        let LoadCode { handle, image: number, options } = LoadCode::read(args)?;
        let mut options = JitOptions::read(options)?;
        let image =
            self.code.store.complete(number, self.capability()).map_err(|_| Refused::Code(CUDA_ERROR_INVALID_IMAGE))?;
        let loaded = self.load_image(call, (kind, handle), &image, &mut options, args);
        self.code.logs.answer(self.header.thread, &options, reply);
        match loaded {
            Ok(()) => Ok(Outcome::Done(CUDA_SUCCESS)),
            // The compiler's words travel with its error.
            Err(Refused::Code(code)) => Ok(Outcome::Done(code)),
            Err(refused) => Err(refused),
        }
    }

    /// Loads an image as a module or library again, for a restore.
    pub(crate) fn load_again(
        &mut self,
        call: u16,
        (kind, handle): (Kind, u64),
        image: &Arc<Image>,
        args: &mut Reader<'_>,
    ) -> Result<(), Refused> {
        let mut options = JitOptions::read(LoadCode::read(args)?.options)?;
        self.load_image(call, (kind, handle), image, &mut options, args)
    }

    fn load_image(
        &mut self,
        call: u16,
        (kind, handle): (Kind, u64),
        image: &Arc<Image>,
        options: &mut JitOptions,
        args: &Reader<'_>,
    ) -> Result<(), Refused> {
        let driver = self.driver();
        let (count, numbers, values) = options.arrays();
        let mut real = 0;
        // SAFETY: the pointer is an image as the driver takes it, which it has copied when it returns; the arrays hold
        // `count` options; the other parameters are locals or null.
        check(image.with_pointer(|pointer| unsafe {
            let none = std::ptr::null_mut;
            match kind {
                Kind::Module if count == 0 => (driver.cuModuleLoadData)(&raw mut real, pointer),
                Kind::Module => (driver.cuModuleLoadDataEx)(&raw mut real, pointer, count, numbers, values),
                _ => {
                    let library = &raw mut real;
                    (driver.cuLibraryLoadData)(library, pointer, numbers, values, count, none(), none().cast(), 0)
                }
            }
        }))?;
        let context = if kind == Kind::Module { self.header.context } else { 0 };
        if !self.session.objects.insert(handle, Object { kind, real, context, parent: 0, allocates: false }) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        self.session.objects.record(call, handle, self.header.context, args.all(), Some(image.hash));
        if image.prints {
            self.code.prints.capture();
        }
        self.code.loaded.insert(handle, image.clone());
        if self.header.context != 0 {
            self.instantiate(handle)?;
        }
        Ok(())
    }

    fn unload(&mut self, kind: Kind, args: &mut Reader<'_>) -> Result<(), Refused> {
        let UnloadCode { handle } = UnloadCode::read(args)?;
        let real = self.of_kind(handle, kind)?;
        // What runs from it must be done: the driver waits here too.
        self.finish_streams(0)?;
        // SAFETY: the handle is the driver's own, and is forgotten below.
        check(unsafe {
            if kind == Kind::Module {
                (self.driver().cuModuleUnload)(real)
            } else {
                (self.driver().cuLibraryUnload)(real)
            }
        })?;
        let call = if kind == Kind::Module { command::MODULE_UNLOAD } else { command::LIBRARY_UNLOAD };
        // A module is unloaded in its own context, whatever the current one is.
        let context = self.session.objects.get(handle).map_or(0, |o| o.context);
        self.session.objects.unload(handle, call, context, args.all());
        self.code.loaded.remove(&handle);
        self.forget_code();
        self.code.globals.retain(|(parent, _), _| *parent != handle);
        Ok(())
    }

    /// Drops the images that no record needs any more, and cuts the log where those of unloaded code are too large.
    pub(crate) fn forget_code(&mut self) {
        // A restore needs images whose records are still to come.
        if self.session.shared.is_none() {
            return;
        }
        loop {
            let (loaded, needed) = self.session.objects.code();
            self.code.store.keep_only(&needed);
            if self.code.store.bytes_besides(&loaded) <= MOST_UNLOADED_BYTES {
                return;
            }
            self.session.objects.cut();
        }
    }

    fn of_kind(&self, handle: u64, kind: Kind) -> Result<u64, Refused> {
        match self.session.objects.get(handle) {
            Some(o) if o.kind == kind => Ok(o.real),
            _ => Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE)),
        }
    }

    /// Makes sure that the globals of a module or library are placed in the current context, and remembers where. The
    /// driver places them when they are first asked for; asking at once, in the order of the log, makes a restore
    /// place them alike.
    pub(crate) fn instantiate(&mut self, parent: u64) -> Result<(), Refused> {
        let context = self.header.context;
        if context == 0 || self.code.globals.contains_key(&(parent, context)) {
            return Ok(());
        }
        let Some(image) = self.code.loaded.get(&parent).cloned() else { return Ok(()) };
        let placed = match &image.globals {
            Ok(globals) => {
                let mut placed = Vec::new();
                for global in globals {
                    match self.place(parent, &global.name) {
                        Ok(place) => placed.push(Placed::new(&global.name, place)),
                        Err(Refused::Code(CUDA_ERROR_NOT_FOUND)) if global.constant => {}
                        Err(Refused::Code(CUDA_ERROR_NOT_FOUND)) => {
                            let name = global.name.to_string_lossy();
                            self.cannot_save(format!("the driver does not say where the variable `{name}` lies"));
                        }
                        Err(error) => return Err(error),
                    }
                }
                self.read_initial(context, globals, &mut placed);
                placed
            }
            // Code for other devices: the driver has loaded nothing.
            Err(_) if self.has_no_binary(parent) => Vec::new(),
            Err(why) => {
                self.cannot_save(format!("it has loaded code whose variables cannot be saved: {why}"));
                Vec::new()
            }
        };
        if !placed.is_empty() {
            let mut record = Writer::new();
            Instantiate { parent }.write(&mut record);
            self.session.objects.record(command::INSTANTIATE, parent, context, record.bytes(), None);
        }
        self.code.globals.insert((parent, context), placed);
        Ok(())
    }

    /// Whether a library has nothing for the current context's device.
    fn has_no_binary(&self, parent: u64) -> bool {
        let Some(library) = self.session.objects.get(parent).filter(|o| o.kind == Kind::Library) else { return false };
        let mut module = 0;
        // SAFETY: the handle is the driver's own, the out parameter a local.
        let answer = unsafe { (self.driver().cuLibraryGetModule)(&raw mut module, library.real) };
        answer == CUDA_ERROR_NO_BINARY_FOR_GPU
    }

    /// Loads a function's code, where that has not been done yet (for a kernel, in the current context), and records
    /// it. Under lazy loading this is when the driver chooses the code's addresses, by what is loaded already. So the
    /// first use has its place in the log, and a restore loads the function there. Where the driver refuses, the call
    /// that uses the function gets the driver's answer.
    pub(crate) fn use_function(&mut self, handle: u64) {
        if !self.session.objects.is_used(handle, self.header.context) {
            let _ = self.load_function(handle);
        }
    }

    /// The same, with the driver's answer.
    pub(crate) fn load_function(&mut self, handle: u64) -> Result<(), Refused> {
        let object = *self.session.objects.get(handle).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        let context = self.header.context;
        let mut function = object.real;
        if object.kind == Kind::Kernel {
            // It becomes a function in a context.
            if context == 0 {
                return Ok(());
            }
            self.instantiate(object.parent)?;
            // SAFETY: the out parameter is a local, the handle the driver's own.
            check(unsafe { (self.driver().cuKernelGetFunction)(&raw mut function, object.real) })?;
        }
        // SAFETY: the handle is the driver's own.
        check(unsafe { (self.driver().cuFuncLoad)(function) })?;
        if self.session.objects.first_use(handle, context) {
            self.session.objects.record(self.code.function_load, handle, context, &handle.to_le_bytes(), None);
        }
        Ok(())
    }

    fn cannot_save(&mut self, why: String) {
        self.session.unsavable.get_or_insert(why);
    }

    /// Forgets where globals lay in a context that is gone.
    pub(crate) fn forget_globals(&mut self, context: u64) {
        self.code.globals.retain(|(_, c), _| *c != context);
    }

    fn place(&self, parent: u64, name: &CStr) -> Result<(u64, u64), Refused> {
        let object = self.session.objects.get(parent).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        let (mut address, mut size) = (0, 0);
        // SAFETY: the handle is the driver's own; the others are locals and a C string.
        check(unsafe {
            let get = if object.kind == Kind::Module {
                self.driver().cuModuleGetGlobal_v2
            } else {
                self.driver().cuLibraryGetGlobal
            };
            get(&raw mut address, &raw mut size, object.real, name.as_ptr())
        })?;
        Ok((address, size as u64))
    }

    fn global(&mut self, kind: Kind, args: &mut Reader<'_>, reply: &mut Writer) -> Result<(), Refused> {
        let FindGlobal { parent, name } = FindGlobal::read(args)?;
        self.of_kind(parent, kind)?;
        self.instantiate(parent)?;
        let (address, size) = self.place(parent, name)?;
        let known = self.code.globals.entry((parent, self.header.context)).or_default();
        if !known.iter().any(|g| g.address == address) {
            // The driver knows a variable that the image does not tell of.
            known.push(Placed::new(name, (address, size)));
            let call = if kind == Kind::Module { command::MODULE_GLOBAL } else { command::LIBRARY_GLOBAL };
            self.session.objects.record(call, parent, self.header.context, args.all(), None);
        }
        reply.word(address);
        reply.word(size);
        Ok(())
    }

    fn add_function(
        &mut self,
        kind: Kind,
        (handle, real): (u64, u64),
        parent: u64,
        name: &CStr,
        args: &Reader<'_>,
        call: u16,
    ) -> Result<(), Refused> {
        // A library's module has the library's code.
        let origin = match self.session.objects.get(parent) {
            Some(o) if o.kind == Kind::Module && o.parent != 0 => o.parent,
            _ => parent,
        };
        let allocates = self.code.loaded.get(&origin).is_some_and(|i| i.allocating.contains(&*name.to_string_lossy()));
        let context = if kind == Kind::Function { self.header.context } else { 0 };
        if !self.session.objects.insert(handle, Object { kind, real, context, parent, allocates }) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        self.session.objects.record(call, handle, self.header.context, args.all(), None);
        Ok(())
    }

    fn module_function(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<(), Refused> {
        let FindFunction { function: handle, parent: module, name } = FindFunction::read(args)?;
        let parent = self.of_kind(module, Kind::Module)?;
        let driver = self.driver();
        let mut real = 0;
        // SAFETY: the out parameter is a local, the handle the driver's own, the name a C string.
        check(unsafe { (driver.cuModuleGetFunction)(&raw mut real, parent, name.as_ptr()) })?;
        parameter_layout(reply, |i, offset, size| {
            // SAFETY: out parameters are locals of the caller.
            unsafe { (driver.cuFuncGetParamInfo)(real, i, offset, size) }
        })?;
        self.add_function(Kind::Function, (handle, real), module, name, args, command::MODULE_FUNCTION)
    }

    fn library_kernel(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<(), Refused> {
        let FindFunction { function: handle, parent: library, name } = FindFunction::read(args)?;
        let parent = self.of_kind(library, Kind::Library)?;
        let driver = self.driver();
        let mut real = 0;
        // SAFETY: the out parameter is a local, the handle the driver's own, the name a C string.
        check(unsafe { (driver.cuLibraryGetKernel)(&raw mut real, parent, name.as_ptr()) })?;
        if self.header.context == 0 {
            // Without a context the driver does not tell, and asking it in one would load the library there.
            let name = name.to_string_lossy();
            let params = self.code.loaded.get(&library).and_then(|i| i.params.get(&*name));
            let params = params.ok_or(Refused::Code(CUDA_ERROR_INVALID_CONTEXT))?;
            reply.word(params.len() as u64);
            params.iter().for_each(|(offset, size)| reply.word(offset << 32 | size));
        } else {
            parameter_layout(reply, |i, offset, size| {
                // SAFETY: out parameters are locals of the caller.
                unsafe { (driver.cuKernelGetParamInfo)(real, i, offset, size) }
            })?;
        }
        self.add_function(Kind::Kernel, (handle, real), library, name, args, command::LIBRARY_KERNEL)
    }

    fn kernel_function(&mut self, args: &mut Reader<'_>) -> Result<(), Refused> {
        let KernelFunction { function: handle, kernel } = KernelFunction::read(args)?;
        let object = *self.session.objects.get(kernel).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        let parent = self.of_kind(kernel, Kind::Kernel)?;
        self.instantiate(object.parent)?;
        let mut real = 0;
        // SAFETY: the out parameter is a local, the handle the driver's own.
        check(unsafe { (self.driver().cuKernelGetFunction)(&raw mut real, parent) })?;
        let function = Object {
            kind: Kind::Function,
            real,
            context: self.header.context,
            parent: kernel,
            allocates: object.allocates,
        };
        if !self.session.objects.insert(handle, function) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        self.session.objects.record(command::KERNEL_FUNCTION, handle, self.header.context, args.all(), None);
        Ok(())
    }

    fn library_module(&mut self, args: &mut Reader<'_>) -> Result<(), Refused> {
        let LibraryModule { module: handle, library } = LibraryModule::read(args)?;
        let parent = self.of_kind(library, Kind::Library)?;
        self.instantiate(library)?;
        let mut real = 0;
        // SAFETY: the out parameter is a local, the handle the driver's own.
        check(unsafe { (self.driver().cuLibraryGetModule)(&raw mut real, parent) })?;
        let context = self.header.context;
        let module = Object { kind: Kind::Module, real, context, parent: library, allocates: false };
        if !self.session.objects.insert(handle, module) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        self.session.objects.record(command::LIBRARY_MODULE, handle, context, args.all(), None);
        Ok(())
    }

    fn kernel_names(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<(), Refused> {
        let KernelNames { parent, start } = KernelNames::read(args)?;
        let object = *self.session.objects.get(parent).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        let driver = self.driver();
        let mut count = 0;
        let mut all = Vec::new();
        // SAFETY: out parameters are locals; the array holds `count` elements.
        unsafe {
            match object.kind {
                Kind::Module => {
                    check((driver.cuModuleGetFunctionCount)(&raw mut count, object.real))?;
                    all.resize(count as usize, 0);
                    check((driver.cuModuleEnumerateFunctions)(all.as_mut_ptr(), count, object.real))?;
                }
                Kind::Library => {
                    check((driver.cuLibraryGetKernelCount)(&raw mut count, object.real))?;
                    all.resize(count as usize, 0);
                    check((driver.cuLibraryEnumerateKernels)(all.as_mut_ptr(), count, object.real))?;
                }
                _ => return Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE)),
            }
        }
        let mut names = Writer::new();
        let mut written = 0_u64;
        for &real in all.iter().skip(start as usize) {
            let mut name = std::ptr::null();
            // SAFETY: the out parameter is a local; the name is a C string that lives as long as the code.
            let name = unsafe {
                check(if object.kind == Kind::Module {
                    (driver.cuFuncGetName)(&raw mut name, real)
                } else {
                    (driver.cuKernelGetName)(&raw mut name, real)
                })?;
                CStr::from_ptr(name)
            };
            if 16 + names.bytes().len() + 8 + name.to_bytes_with_nul().len().next_multiple_of(8) > REPLY_BYTES {
                break;
            }
            names.text(name);
            written += 1;
        }
        reply.word(all.len() as u64);
        reply.word(written);
        reply.raw(names.bytes());
        Ok(())
    }
}

/// Writes a kernel's parameter layout: the count, then offset and size of each.
fn parameter_layout(
    reply: &mut Writer,
    get: impl Fn(usize, *mut usize, *mut usize) -> CUresult,
) -> Result<(), Refused> {
    let mut layout = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        match get(layout.len(), &raw mut offset, &raw mut size) {
            CUDA_SUCCESS => layout.push((offset as u64) << 32 | size as u64),
            CUDA_ERROR_INVALID_VALUE => break,
            error => return Err(Refused::Code(error)),
        }
    }
    reply.word(layout.len() as u64);
    layout.into_iter().for_each(|w| reply.word(w));
    Ok(())
}

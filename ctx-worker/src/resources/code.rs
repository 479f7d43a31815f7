//! Commands about code: modules, libraries, kernels, functions, globals.

use std::ffi::CStr;
use std::sync::Arc;

use rekindle_cuda_abi::types::*;
use rekindle_wire::VARIABLES;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{
    self, CodePart, FindFunction, FindGlobal, Instantiate, KernelFunction, KernelNames, Kind, LibraryModule, LinkAdd,
    LoadCode, UnloadCode,
};
use rekindle_wire::layout::REPLY_BYTES;
use tracing::{trace, warn};

use crate::resources::code_store::{Image, UnknownGlobals};
use crate::resources::globals::Placed;
use crate::resources::initial::Loading;
use crate::resources::jit::JitOptions;
use crate::resources::{Code, Memory};
use crate::session::Session;
use crate::session::call::Call;
use crate::session::objects::Object;
use crate::session::outcome::{Outcome, Refused, check};

/// The most bytes of code images that are kept for unloaded code.
const MOST_UNLOADED_BYTES: usize = 1 << 30;

impl Code {
    /// Executes a command about code, except for those that unload code.
    pub(crate) fn code_command(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        number: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        match number {
            command::CODE_PART => self.code_part(args)?,
            command::MODULE_LOAD => return self.load(call, loading, Kind::Module, args, reply),
            command::LIBRARY_LOAD => return self.load(call, loading, Kind::Library, args, reply),
            command::CODE_LOG => return self.logs.fetch(call.header.thread, args, reply),
            command::MODULE_FUNCTION => self.module_function(call, args, reply)?,
            command::LIBRARY_KERNEL => self.library_kernel(call, args, reply)?,
            command::KERNEL_FUNCTION => self.kernel_function(call, loading, args)?,
            command::LIBRARY_MODULE => self.library_module(call, loading, args)?,
            command::MODULE_GLOBAL => self.global(call, loading, Kind::Module, args, reply)?,
            command::LIBRARY_GLOBAL => self.global(call, loading, Kind::Library, args, reply)?,
            command::KERNEL_NAMES => self.kernel_names(call, args, reply)?,
            _ => return self.link_command(call, loading.memory, number, args, reply),
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn link_command(
        &mut self,
        call: &mut Call,
        memory: &Memory,
        number: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        let (links, logs) = (&mut self.links, &mut self.logs);
        let result = match number {
            command::LINK_CREATE => links.create(call, args)?,
            command::LINK_ADD => {
                let add = LinkAdd::read(args)?;
                let arrived = self.store.complete(add.image, memory.capability());
                let image = arrived.map_err(|_| Refused::Code(CUDA_ERROR_INVALID_IMAGE))?;
                links.add(call, logs, &add, args.all(), &image, reply)?
            }
            command::LINK_COMPLETE => links.complete(call, logs, args, reply)?,
            command::LINK_OUTPUT => links.output(args, reply)?,
            command::LINK_DESTROY => links.destroy(call, args)?,
            _ => return Err(Refused::UnknownCall(number)),
        };
        Ok(Outcome::Done(result))
    }

    fn code_part(&mut self, args: &mut Reader<'_>) -> Result<(), Refused> {
        let CodePart { image, offset, total, bytes } = CodePart::read(args)?;
        self.store.part(image, offset, total, bytes).map_err(|_| Refused::Code(CUDA_ERROR_INVALID_IMAGE))
    }

    fn load(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        kind: Kind,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        let LoadCode { handle, image: number, options } = LoadCode::read(args)?;
        let mut options = JitOptions::read(options)?;
        let image = self
            .store
            .complete(number, loading.memory.capability())
            .map_err(|_| Refused::Code(CUDA_ERROR_INVALID_IMAGE))?;
        let loaded = self.load_image(call, loading, (kind, handle), &image, &mut options, args);
        self.logs.answer(call.header.thread, &options, reply);
        match loaded {
            Ok(()) => Ok(Outcome::Done(CUDA_SUCCESS)),
            // The compiler's log travels with its error.
            Err(Refused::Code(code)) => Ok(Outcome::Done(code)),
            Err(refused) => Err(refused),
        }
    }

    /// Loads an image as a module or library again, for a restore.
    pub(crate) fn load_again(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        (kind, handle): (Kind, u64),
        image: &Arc<Image>,
        args: &mut Reader<'_>,
    ) -> Result<(), Refused> {
        let mut options = JitOptions::read(LoadCode::read(args)?.options)?;
        self.load_image(call, loading, (kind, handle), image, &mut options, args)
    }

    fn load_image(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        (kind, handle): (Kind, u64),
        image: &Arc<Image>,
        options: &mut JitOptions,
        args: &Reader<'_>,
    ) -> Result<(), Refused> {
        if let Err(why @ UnknownGlobals::Managed(_)) = &image.globals {
            warn!("code is refused: {why}");
            return Err(Refused::Code(CUDA_ERROR_NOT_SUPPORTED));
        }
        let version = call.session.shared.and_then(|it| it.version());
        if image.managed().next().is_some() && version.is_some_and(|it| it < VARIABLES) {
            warn!("code with managed variables is refused: the program has a library of an older Rekindle: restart it");
            return Err(Refused::Code(CUDA_ERROR_NOT_SUPPORTED));
        }
        let real = match self.ahead.take(handle, image.hash) {
            Some(loaded) => loaded.map_err(Refused::Code)?,
            None => options.load(call.driver(), kind, image).map_err(Refused::Code)?,
        };
        let context = if kind == Kind::Module { call.owner() } else { 0 };
        if !call.session.objects.insert(handle, Object { kind, real, context, parent: 0, allocates: false }) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        let number = if kind == Kind::Module { command::MODULE_LOAD } else { command::LIBRARY_LOAD };
        call.session.objects.record(number, handle, call.owner(), args.all(), Some(image.hash));
        if image.prints {
            self.prints.capture();
        }
        self.loaded.insert(handle, image.clone());
        if call.header.context != 0 {
            self.instantiate(call, loading, handle)?;
        }
        Ok(())
    }

    /// Unloads a module or library whose code no longer runs.
    pub(crate) fn unload(
        &mut self,
        call: &mut Call,
        kind: Kind,
        handle: u64,
        args: &Reader<'_>,
    ) -> Result<(), Refused> {
        let (driver, real) = (call.driver(), of_kind(call, handle, kind)?);
        // SAFETY: the handle is the driver's own, and is forgotten below.
        check(unsafe {
            if kind == Kind::Module { (driver.cuModuleUnload)(real) } else { (driver.cuLibraryUnload)(real) }
        })?;
        let number = if kind == Kind::Module { command::MODULE_UNLOAD } else { command::LIBRARY_UNLOAD };
        // A module is unloaded in its own context, whatever the current one is.
        let context = call.session.objects.get(handle).map_or(0, |o| o.context);
        call.session.objects.unload(handle, number, context, args.all());
        self.loaded.remove(&handle);
        self.forget_code(&mut call.session);
        self.globals.retain(|(parent, _), _| *parent != handle);
        Ok(())
    }

    /// Drops the images that no record needs any more, and cuts the log where the images of unloaded code are too large.
    pub(crate) fn forget_code(&mut self, session: &mut Session) {
        // A restore needs images whose records have not been replayed yet.
        if session.shared.is_none() {
            return;
        }
        loop {
            let (loaded, needed) = session.objects.code();
            self.store.keep_only(&needed);
            if self.store.bytes_besides(&loaded) <= MOST_UNLOADED_BYTES || !session.objects.cut() {
                return;
            }
        }
    }

    /// Refuses to use a library with managed variables in a second context: the driver would have one variable for all contexts, and
    /// here each would have one of its own.
    fn has_its_variables_here(&self, call: &Call, parent: u64) -> Result<(), Refused> {
        let Some(variable) = self.loaded.get(&parent).and_then(|image| image.managed().next()) else { return Ok(()) };
        let context = call.owner();
        if context == 0 || self.globals.keys().all(|(other, at)| *other != parent || *at == context) {
            return Ok(());
        }
        let name = variable.name.to_string_lossy();
        warn!("code with the managed variable `{name}` is in use in one context, and is refused in a second one");
        Err(Refused::Code(CUDA_ERROR_NOT_SUPPORTED))
    }

    /// The module or library that has the code of one. A library's module has the library's.
    fn with_code(session: &Session, parent: u64) -> u64 {
        match session.objects.get(parent) {
            Some(o) if o.kind == Kind::Module && o.parent != 0 => o.parent,
            _ => parent,
        }
    }

    /// The module or library that has this managed variable in a context, where the driver has placed it so.
    pub(crate) fn managed_variable(
        &self,
        session: &Session,
        (parent, context): (u64, u64),
        (address, size): (u64, u64),
    ) -> Option<u64> {
        let origin = Self::with_code(session, parent);
        let is_it = |it: &&Placed| it.address == address && it.size == size && size > 0;
        let placed = self.globals.get(&(origin, context))?.iter().find(is_it)?;
        self.is_managed(origin, &placed.name).then_some(origin)
    }

    fn is_managed(&self, origin: u64, name: &CStr) -> bool {
        self.loaded.get(&origin).is_some_and(|image| image.managed().any(|it| it.name.as_c_str() == name))
    }

    /// Makes sure that the globals of a module or library are placed in the current context, and remembers their places.
    /// The driver places globals when they are first asked for. The worker asks at once, in the order of the log, so that a
    /// restore places them alike.
    pub(crate) fn instantiate(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        parent: u64,
    ) -> Result<(), Refused> {
        let context = call.owner();
        if context == 0 || self.globals.contains_key(&(parent, context)) {
            return Ok(());
        }
        let Some(image) = self.loaded.get(&parent).cloned() else { return Ok(()) };
        self.has_its_variables_here(call, parent)?;
        let placed = match &image.globals {
            Ok(globals) => {
                let mut placed = Vec::new();
                for global in globals {
                    match place(call, parent, &global.name) {
                        Ok(place) => placed.push(Placed::new(&global.name, place)),
                        Err(Refused::Code(CUDA_ERROR_NOT_FOUND)) if global.constant => {}
                        Err(Refused::Code(CUDA_ERROR_NOT_FOUND)) => {
                            let name = global.name.to_string_lossy();
                            cannot_save(
                                &mut call.session,
                                format!("the driver does not say where the variable `{name}` lies"),
                            );
                        }
                        Err(error) => return Err(error),
                    }
                }
                loading.read_initial(call, globals, &mut placed);
                for variable in &placed {
                    trace!("the driver placed the variable {:?} at {:#x}", variable.name, variable.address);
                }
                placed
            }
            // The code is for other devices: the driver has loaded none of it.
            Err(_) if has_no_binary(call, parent) => Vec::new(),
            Err(why) => {
                cannot_save(&mut call.session, format!("it has loaded code whose variables cannot be saved: {why}"));
                Vec::new()
            }
        };
        if !placed.is_empty() {
            let mut record = Writer::new();
            Instantiate { parent }.write(&mut record);
            call.session.objects.record(command::INSTANTIATE, parent, context, record.bytes(), None);
        }
        self.globals.insert((parent, context), placed);
        Ok(())
    }

    /// Loads a function's code, where that has not been done yet (for a kernel, in the current context), and records the
    /// load. Under lazy loading the driver chooses the code's addresses at this point, depending on the code that is loaded
    /// already. So the first use has its place in the log, and a restore loads the function there. Where the driver
    /// refuses, the call that uses the function gets the driver's answer.
    pub(crate) fn use_function(&mut self, call: &mut Call, loading: &mut Loading<'_>, handle: u64) {
        if !call.session.objects.is_used(handle, call.owner()) {
            let _ = self.load_function(call, loading, handle);
        }
    }

    /// The driver's handle of a function that is about to be used, whose code is loaded first. A kernel may be given in
    /// place of a function, as in the driver.
    pub(crate) fn function(&mut self, call: &mut Call, loading: &mut Loading<'_>, handle: u64) -> Result<u64, Refused> {
        let real = call.session.object(handle, &[Kind::Function, Kind::Kernel])?;
        // A function is of the context that it was made for.
        let kernel = call.session.objects.get(handle).filter(|it| it.kind == Kind::Kernel);
        if let Some(kernel) = kernel.filter(|_| !call.session.objects.is_used(handle, call.owner())) {
            self.has_its_variables_here(call, kernel.parent)?;
        }
        self.use_function(call, loading, handle);
        Ok(real)
    }

    /// Loads a function's code, and returns the driver's answer.
    pub(crate) fn load_function(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        handle: u64,
    ) -> Result<(), Refused> {
        let object = *call.session.objects.get(handle).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        let context = call.owner();
        let mut function = object.real;
        if object.kind == Kind::Kernel {
            // The kernel becomes a function in a context.
            if context == 0 {
                return Ok(());
            }
            self.instantiate(call, loading, object.parent)?;
            // SAFETY: the out parameter is a local, the handle the driver's own.
            check(unsafe { (call.driver().cuKernelGetFunction)(&raw mut function, object.real) })?;
        }
        // SAFETY: the handle is the driver's own.
        check(unsafe { (call.driver().cuFuncLoad)(function) })?;
        trace!("the driver loaded the function {handle:#x}");
        if call.session.objects.first_use(handle, context) {
            call.session.objects.record(self.function_load, handle, context, &handle.to_le_bytes(), None);
        }
        Ok(())
    }

    /// Forgets the places of globals in a context that is gone.
    pub(crate) fn forget_globals(&mut self, context: u64) {
        self.globals.retain(|(_, c), _| *c != context);
    }

    fn global(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        kind: Kind,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<(), Refused> {
        let FindGlobal { parent, name } = FindGlobal::read(args)?;
        of_kind(call, parent, kind)?;
        self.instantiate(call, loading, parent)?;
        let (address, size) = place(call, parent, name)?;
        if is_managed_by_driver(call, address) {
            warn!(
                "the driver has made {name:?} managed memory of its own, which the process cannot have: it is refused"
            );
            return Err(Refused::Code(CUDA_ERROR_NOT_SUPPORTED));
        }
        let known = self.globals.entry((parent, call.owner())).or_default();
        if !known.iter().any(|g| g.address == address) {
            // The driver knows a variable that the image does not describe.
            known.push(Placed::new(name, (address, size)));
            let number = if kind == Kind::Module { command::MODULE_GLOBAL } else { command::LIBRARY_GLOBAL };
            call.session.objects.record(number, parent, call.owner(), args.all(), None);
        }
        reply.word(address);
        reply.word(size);
        reply.word(self.is_managed(Self::with_code(&call.session, parent), name).into());
        Ok(())
    }

    fn add_function(
        &mut self,
        call: &mut Call,
        (number, kind): (u16, Kind),
        (handle, real): (u64, u64),
        parent: u64,
        name: &CStr,
        args: &Reader<'_>,
    ) -> Result<(), Refused> {
        let origin = Self::with_code(&call.session, parent);
        let allocates = self.loaded.get(&origin).is_some_and(|i| i.allocating.contains(&*name.to_string_lossy()));
        let context = if kind == Kind::Function { call.owner() } else { 0 };
        if !call.session.objects.insert(handle, Object { kind, real, context, parent, allocates }) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        call.session.objects.record(number, handle, call.owner(), args.all(), None);
        Ok(())
    }

    fn module_function(&mut self, call: &mut Call, args: &mut Reader<'_>, reply: &mut Writer) -> Result<(), Refused> {
        let FindFunction { function: handle, parent: module, name } = FindFunction::read(args)?;
        let parent = of_kind(call, module, Kind::Module)?;
        let driver = call.driver();
        let mut real = 0;
        // SAFETY: the out parameter is a local, the handle the driver's own, the name a C string.
        check(unsafe { (driver.cuModuleGetFunction)(&raw mut real, parent, name.as_ptr()) })?;
        parameter_layout(reply, |i, offset, size| {
            // SAFETY: out parameters are locals of the caller.
            unsafe { (driver.cuFuncGetParamInfo)(real, i, offset, size) }
        })?;
        let kind = (command::MODULE_FUNCTION, Kind::Function);
        self.add_function(call, kind, (handle, real), module, name, args)
    }

    fn library_kernel(&mut self, call: &mut Call, args: &mut Reader<'_>, reply: &mut Writer) -> Result<(), Refused> {
        let FindFunction { function: handle, parent: library, name } = FindFunction::read(args)?;
        let parent = of_kind(call, library, Kind::Library)?;
        let driver = call.driver();
        let mut real = 0;
        // SAFETY: the out parameter is a local, the handle the driver's own, the name a C string.
        check(unsafe { (driver.cuLibraryGetKernel)(&raw mut real, parent, name.as_ptr()) })?;
        if call.header.context == 0 {
            // Without a context the driver does not give the layout, and asking in a context would load the library there.
            let name = name.to_string_lossy();
            let params = self.loaded.get(&library).and_then(|i| i.params.get(&*name));
            let params = params.ok_or(Refused::Code(CUDA_ERROR_INVALID_CONTEXT))?;
            reply.word(params.len() as u64);
            params.iter().for_each(|(offset, size)| reply.word(offset << 32 | size));
        } else {
            parameter_layout(reply, |i, offset, size| {
                // SAFETY: out parameters are locals of the caller.
                unsafe { (driver.cuKernelGetParamInfo)(real, i, offset, size) }
            })?;
        }
        let kind = (command::LIBRARY_KERNEL, Kind::Kernel);
        self.add_function(call, kind, (handle, real), library, name, args)
    }

    fn kernel_function(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        args: &mut Reader<'_>,
    ) -> Result<(), Refused> {
        let KernelFunction { function: handle, kernel } = KernelFunction::read(args)?;
        let object = *call.session.objects.get(kernel).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        let parent = of_kind(call, kernel, Kind::Kernel)?;
        self.instantiate(call, loading, object.parent)?;
        let mut real = 0;
        // SAFETY: the out parameter is a local, the handle the driver's own.
        check(unsafe { (call.driver().cuKernelGetFunction)(&raw mut real, parent) })?;
        let function =
            Object { kind: Kind::Function, real, context: call.owner(), parent: kernel, allocates: object.allocates };
        if !call.session.objects.insert(handle, function) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        call.session.objects.record(command::KERNEL_FUNCTION, handle, call.owner(), args.all(), None);
        Ok(())
    }

    fn library_module(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        args: &mut Reader<'_>,
    ) -> Result<(), Refused> {
        let LibraryModule { module: handle, library } = LibraryModule::read(args)?;
        let parent = of_kind(call, library, Kind::Library)?;
        self.instantiate(call, loading, library)?;
        let mut real = 0;
        // SAFETY: the out parameter is a local, the handle the driver's own.
        check(unsafe { (call.driver().cuLibraryGetModule)(&raw mut real, parent) })?;
        let context = call.owner();
        let module = Object { kind: Kind::Module, real, context, parent: library, allocates: false };
        if !call.session.objects.insert(handle, module) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        call.session.objects.record(command::LIBRARY_MODULE, handle, context, args.all(), None);
        Ok(())
    }

    fn kernel_names(&mut self, call: &mut Call, args: &mut Reader<'_>, reply: &mut Writer) -> Result<(), Refused> {
        let KernelNames { parent, start } = KernelNames::read(args)?;
        let object = *call.session.objects.get(parent).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        let driver = call.driver();
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

/// Reads the parameters of a command that unloads a module or library: a handle of that kind.
pub(crate) fn to_unload(call: &Call, kind: Kind, args: &mut Reader<'_>) -> Result<u64, Refused> {
    let UnloadCode { handle } = UnloadCode::read(args)?;
    of_kind(call, handle, kind)?;
    Ok(handle)
}

/// Writes a kernel's parameter layout: the count, then the offset and size of each parameter.
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

/// The driver's handle of an object of this kind.
fn of_kind(call: &Call, handle: u64, kind: Kind) -> Result<u64, Refused> {
    call.session.object(handle, &[kind])
}

/// Whether a library has no code for the current context's device.
fn has_no_binary(call: &Call, parent: u64) -> bool {
    let Some(library) = call.session.objects.get(parent).filter(|o| o.kind == Kind::Library) else { return false };
    let mut module = 0;
    // SAFETY: the handle is the driver's own, the out parameter a local.
    let answer = unsafe { (call.driver().cuLibraryGetModule)(&raw mut module, library.real) };
    answer == CUDA_ERROR_NO_BINARY_FOR_GPU
}

/// Notes why the client cannot be saved; the first reason stays.
fn cannot_save(session: &mut Session, why: String) {
    session.unsavable.get_or_insert(why);
}

/// Whether a variable lies in managed memory of the driver's, since the code that declares it so could not be changed.
fn is_managed_by_driver(call: &Call, address: u64) -> bool {
    const IS_MANAGED: u32 = 8; // CU_POINTER_ATTRIBUTE_IS_MANAGED
    let mut is_managed = 0_u32;
    // SAFETY: the out parameter is a local of the attribute's size.
    let asked = unsafe { (call.driver().cuPointerGetAttribute)((&raw mut is_managed).cast(), IS_MANAGED, address) };
    asked == CUDA_SUCCESS && is_managed != 0
}

/// The address and the size of a variable that the driver has placed.
fn place(call: &Call, parent: u64, name: &CStr) -> Result<(u64, u64), Refused> {
    let object = call.session.objects.get(parent).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
    let (mut address, mut size) = (0, 0);
    // SAFETY: the handle is the driver's own; the others are locals and a C string.
    check(unsafe {
        let get = if object.kind == Kind::Module {
            call.driver().cuModuleGetGlobal_v2
        } else {
            call.driver().cuLibraryGetGlobal
        };
        get(&raw mut address, &raw mut size, object.real, name.as_ptr())
    })?;
    Ok((address, size as u64))
}

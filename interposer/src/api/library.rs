//! Code: modules, libraries, their kernels, functions and globals.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ops::Range;
use std::sync::Arc;

use rekindle_cuda_abi::code;
use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{
    FindFunction, FindGlobal, KERNEL_FUNCTION, KernelFunction, Kind, LIBRARY_GLOBAL, LIBRARY_KERNEL, LIBRARY_LOAD,
    LIBRARY_MODULE, LIBRARY_UNLOAD, LibraryModule, LoadCode, MODULE_FUNCTION, MODULE_GLOBAL, MODULE_LOAD,
    MODULE_UNLOAD, UnloadCode,
};

use super::jit::Options;
use super::primary;
use super::{check, code as answer, put, put_if};
use crate::call::{Call, perform, standing_error};
use crate::connection::command::Reply;
use crate::operations::code::send_parts;
use crate::operations::variables;
use crate::state::client::{self, Client};
use crate::state::contexts;
use crate::state::functions::Function;
use crate::state::memory::Allocation;

/// Sends a code image's bytes ahead of the command that loads it. Returns the number under which the worker has it.
///
/// # Safety
/// `image` is what a program may pass to `cuModuleLoadData`.
unsafe fn send_image(image: *const c_void) -> Result<u64, CUresult> {
    if image.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    let extent = unsafe { code::image_extent(image.cast()) }.map_err(|_| CUDA_ERROR_INVALID_IMAGE)?;
    // SAFETY: the parts lie in the program's image, which stays while this call runs.
    let parts: Vec<&[u8]> = extent.parts.iter().map(|p| unsafe { p.as_slice() }).collect();
    send_parts(&parts)
}

/// # Safety
/// `image` is what a program may pass to `cuModuleLoadData`, and `out` null or writable.
unsafe fn load(call: u16, kind: Kind, out: *mut u64, image: *const c_void, options: &Options) -> Result<(), CUresult> {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if kind == Kind::Module {
        client::get()?.contexts.current()?;
    }
    // SAFETY: the caller's promise.
    let number = unsafe { send_image(image) }?;
    let mut call = Call::new(call)?;
    let handle = client::get()?.fresh(kind);
    call.put(&LoadCode { handle, image: number, options: &options.bytes() });
    let (result, mut reply) = call.wait();
    options.write_back(&mut reply);
    check(result)?;
    // SAFETY: not null, so writable by the caller's promise.
    unsafe { put(out, handle) }
}

/// Reads a file that the caller names by its own path, with a NUL after it in case it is PTX.
///
/// # Safety
/// `name` is null or a C string.
pub(super) unsafe fn read_file(name: *const c_char) -> Result<Vec<u8>, CUresult> {
    if name.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so a C string by the caller's promise.
    let path = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| CUDA_ERROR_FILE_NOT_FOUND)?;
    let mut bytes = std::fs::read(path).map_err(|_| CUDA_ERROR_FILE_NOT_FOUND)?;
    bytes.push(0);
    Ok(bytes)
}

pub(crate) unsafe fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    answer(unsafe { load(MODULE_LOAD, Kind::Module, module, image, &Options::default()) })
}

pub(crate) unsafe fn cuModuleLoadDataEx(
    module: *mut CUmodule,
    image: *const c_void,
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    answer(unsafe {
        Options::read(count, options, values)
            .and_then(|options| load(MODULE_LOAD, Kind::Module, module, image, &options))
    })
}

pub(crate) unsafe fn cuModuleLoadFatBinary(module: *mut CUmodule, image: *const c_void) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuModuleLoadData(module, image) }
}

pub(crate) unsafe fn cuModuleLoad(module: *mut CUmodule, name: *const c_char) -> CUresult {
    // SAFETY: the caller's promise by cuda.h; the bytes outlive the load.
    answer(unsafe { read_file(name) }.and_then(|bytes| unsafe {
        load(MODULE_LOAD, Kind::Module, module, bytes.as_ptr().cast(), &Options::default())
    }))
}

pub(crate) unsafe fn cuLibraryLoadData(
    library: *mut CUlibrary,
    image: *const c_void,
    jit_options: *mut u32,
    jit_values: *mut *mut c_void,
    jit_count: u32,
    _options: *mut u32,
    _values: *mut *mut c_void,
    _count: u32,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    answer(unsafe {
        Options::read(jit_count, jit_options, jit_values)
            .and_then(|options| load(LIBRARY_LOAD, Kind::Library, library, image, &options))
    })
}

pub(crate) unsafe fn cuLibraryLoadFromFile(
    library: *mut CUlibrary,
    name: *const c_char,
    jit_options: *mut u32,
    jit_values: *mut *mut c_void,
    jit_count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
    count: u32,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h; the bytes outlive the load.
    match unsafe { read_file(name) } {
        // SAFETY: as above.
        Ok(bytes) => unsafe {
            let image = bytes.as_ptr().cast();
            cuLibraryLoadData(library, image, jit_options, jit_values, jit_count, options, values, count)
        },
        Err(error) => error,
    }
}

fn unload(call: u16, kind: Kind, handle: u64) -> CUresult {
    answer(client::get().and_then(|client| {
        if !kind.owns(handle) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        variables::unloading(client, handle, || perform(call, &UnloadCode { handle }))?;
        client.functions.forget(handle);
        Ok(())
    }))
}

pub(crate) unsafe fn cuModuleUnload(module: CUmodule) -> CUresult {
    unload(MODULE_UNLOAD, Kind::Module, module)
}

pub(crate) unsafe fn cuLibraryUnload(library: CUlibrary) -> CUresult {
    unload(LIBRARY_UNLOAD, Kind::Library, library)
}

fn parameter_layout(reply: &mut Reply) -> Result<Vec<(u32, u32)>, CUresult> {
    let count = reply.word().ok_or(CUDA_ERROR_UNKNOWN)?;
    (0..count).map(|_| reply.word().map(|w| ((w >> 32) as u32, w as u32)).ok_or(CUDA_ERROR_UNKNOWN)).collect()
}

/// # Safety
/// `out` is null or writable, `name` null or a C string.
unsafe fn find(call: u16, kind: Kind, out: *mut u64, parent: u64, name: *const c_char) -> Result<(), CUresult> {
    let client = client::get()?;
    if name.is_null() || out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so a C string by the caller's promise.
    let name = unsafe { CStr::from_ptr(name) };
    if let Some(handle) = client.functions.find(parent, name) {
        // SAFETY: not null, so writable by the caller's promise.
        return unsafe { put(out, handle) };
    }
    let mut call = Call::new(call)?;
    let handle = client.fresh(kind);
    call.put(&FindFunction { function: handle, parent, name });
    let (result, mut reply) = call.wait();
    check(result)?;
    let params = parameter_layout(&mut reply)?;
    let context = if kind == Kind::Function { client.contexts.owner(contexts::current()) } else { 0 };
    client.functions.insert(handle, Arc::new(Function::new(name.to_owned(), parent, context, params)));
    // SAFETY: as above.
    unsafe { put(out, handle) }
}

/// A module's function by name. Those of a library's module are the functions of the library's kernels.
///
/// # Safety
/// `out` is null or writable, `name` null or a C string.
pub(super) unsafe fn find_function(out: *mut u64, module: CUmodule, name: *const c_char) -> Result<(), CUresult> {
    let client = client::get()?;
    let Some((library, context)) = client.functions.library_of(module) else {
        // SAFETY: the caller's promise.
        return unsafe { find(MODULE_FUNCTION, Kind::Function, out, module, name) };
    };
    let mut kernel = 0;
    // SAFETY: a local; the rest is the caller's promise.
    unsafe { find_kernel(&raw mut kernel, library, name) }?;
    let function = kernel_function(client, kernel, context)?;
    // SAFETY: the caller's promise.
    unsafe { put(out, function) }
}

/// A library's kernel by name.
///
/// # Safety
/// `out` is null or writable, `name` null or a C string.
pub(super) unsafe fn find_kernel(out: *mut u64, library: CUlibrary, name: *const c_char) -> Result<(), CUresult> {
    // SAFETY: the caller's promise.
    unsafe { find(LIBRARY_KERNEL, Kind::Kernel, out, library, name) }
}

pub(crate) unsafe fn cuModuleGetFunction(out: *mut CUfunction, module: CUmodule, name: *const c_char) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    answer(unsafe { find_function(out, module, name) })
}

pub(crate) unsafe fn cuLibraryGetKernel(out: *mut CUkernel, library: CUlibrary, name: *const c_char) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    answer(unsafe { find_kernel(out, library, name) })
}

/// The name under which a kernel's function in a context is remembered: the kernel is its parent, and a kernel has one
/// function in each context.
fn function_key(context: CUcontext) -> CString {
    CString::new(format!("{context:x}")).unwrap_or_default()
}

/// A kernel's function in a context, the same handle whenever it is asked for.
fn kernel_function(client: &'static Client, kernel: CUkernel, context: CUcontext) -> Result<CUfunction, CUresult> {
    let known = client.functions.get(kernel).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    if !Kind::Kernel.owns(kernel) {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    let key = function_key(context);
    if let Some(handle) = client.functions.find(kernel, &key) {
        return Ok(handle);
    }
    standing_error(client)?;
    let mut call = Call::unchecked(client, KERNEL_FUNCTION, context);
    let handle = client.fresh(Kind::Function);
    call.put(&KernelFunction { function: handle, kernel });
    check(call.wait().0)?;
    client.functions.insert(handle, Arc::new(Function::new(key, kernel, context, known.params.clone())));
    Ok(handle)
}

pub(crate) unsafe fn cuKernelGetFunction(out: *mut CUfunction, kernel: CUkernel) -> CUresult {
    answer(client::get().and_then(|client| {
        let (context, _) = client.contexts.current()?;
        let handle = kernel_function(client, kernel, context)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(out, handle) }
    }))
}

/// A library's module in a context, the same handle whenever it is asked for.
pub(super) fn library_module(
    client: &'static Client,
    library: CUlibrary,
    context: CUcontext,
) -> Result<CUmodule, CUresult> {
    if !Kind::Library.owns(library) {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    if let Some(module) = client.functions.module_of(library, context) {
        return Ok(module);
    }
    standing_error(client)?;
    let mut call = Call::unchecked(client, LIBRARY_MODULE, context);
    let handle = client.fresh(Kind::Module);
    call.put(&LibraryModule { module: handle, library });
    check(call.wait().0)?;
    Ok(client.functions.add_module(library, context, handle))
}

pub(crate) unsafe fn cuLibraryGetModule(module: *mut CUmodule, library: CUlibrary) -> CUresult {
    answer(client::get().and_then(|client| {
        let (context, _) = client.contexts.current()?;
        let handle = library_module(client, library, context)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(module, handle) }
    }))
}

/// # Safety
/// `address` and `bytes` are null or writable, `name` null or a C string.
unsafe fn global(
    call: u16,
    address: *mut CUdeviceptr,
    bytes: *mut usize,
    parent: u64,
    name: *const c_char,
) -> Result<(), CUresult> {
    // SAFETY: the caller's promise.
    let (range, _) = unsafe { find_global(call, parent, name) }?;
    // SAFETY: the caller's promise.
    unsafe {
        put_if(address, range.start);
        put_if(bytes, (range.end - range.start) as usize);
    }
    Ok(())
}

/// Where a variable lies in the current context, and whether it is a managed one. The process may use it from then on if it is.
///
/// # Safety
/// `name` is null or a C string.
unsafe fn find_global(call: u16, parent: u64, name: *const c_char) -> Result<(Range<u64>, bool), CUresult> {
    let client = client::get()?;
    let (context, known) = client.contexts.current()?;
    let mut call = Call::new(call)?;
    if name.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so a C string by the caller's promise.
    call.put(&FindGlobal { parent, name: unsafe { CStr::from_ptr(name) } });
    let (result, mut reply) = call.wait();
    check(result)?;
    let (base, size) = (reply.word().ok_or(CUDA_ERROR_UNKNOWN)?, reply.word().ok_or(CUDA_ERROR_UNKNOWN)?);
    let is_managed = reply.word().is_some_and(|it| it != 0);
    let range = base..base.checked_add(size).ok_or(CUDA_ERROR_UNKNOWN)?;
    if is_managed {
        variables::found(client, (parent, context), &range)?;
    } else {
        client.memory.insert(Allocation::Global { base, size, device: known.device, context });
    }
    Ok((range, is_managed))
}

pub(crate) unsafe fn cuModuleGetGlobal_v2(
    address: *mut CUdeviceptr,
    bytes: *mut usize,
    module: CUmodule,
    name: *const c_char,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    answer(unsafe { global(MODULE_GLOBAL, address, bytes, module, name) })
}

pub(crate) unsafe fn cuLibraryGetGlobal(
    address: *mut CUdeviceptr,
    bytes: *mut usize,
    library: CUlibrary,
    name: *const c_char,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    answer(unsafe { global(LIBRARY_GLOBAL, address, bytes, library, name) })
}

pub(crate) unsafe fn cuLibraryGetManaged(
    address: *mut CUdeviceptr,
    bytes: *mut usize,
    library: CUlibrary,
    name: *const c_char,
) -> CUresult {
    if !Kind::Library.owns(library) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if address.is_null() && bytes.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let found = || {
        let client = client::get()?;
        // The variable belongs to no context, but it lies in one.
        let known = client.variables.lock().context_of(library);
        let context = match (known, contexts::current()) {
            (Some(known), _) => known,
            (None, 0) => primary::any(client)?,
            (None, current) => current,
        };
        // SAFETY: the caller's promise by cuda.h.
        match contexts::within(context, || unsafe { find_global(LIBRARY_GLOBAL, library, name) })? {
            // SAFETY: as above.
            (range, true) => unsafe {
                put_if(address, range.start);
                put_if(bytes, (range.end - range.start) as usize);
                Ok(())
            },
            (_, false) => Err(CUDA_ERROR_NOT_FOUND),
        }
    };
    answer(found())
}

/// A unified function has the same address on the host and on devices. The driver would put it into the worker's process, where
/// the program cannot call it. So no device has such pointers (attribute 129). The answer is that of driver 580 for a name that is
/// not unified.
pub(crate) unsafe fn cuLibraryGetUnifiedFunction(
    _pointer: *mut *mut c_void,
    library: CUlibrary,
    _symbol: *const c_char,
) -> CUresult {
    if let Err(error) = client::get() {
        return error;
    }
    if !Kind::Library.owns(library) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    CUDA_ERROR_INVALID_VALUE
}

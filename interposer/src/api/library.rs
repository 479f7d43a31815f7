//! Code: modules, libraries, their kernels, functions and globals.

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rekindle_cuda_abi::code;
use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{
    CODE_PART, KERNEL_FUNCTION, KERNEL_NAMES, Kind, LIBRARY_GLOBAL, LIBRARY_KERNEL, LIBRARY_LOAD, LIBRARY_MODULE,
    LIBRARY_UNLOAD, MODULE_FUNCTION, MODULE_GLOBAL, MODULE_LOAD, MODULE_UNLOAD,
};

use super::{check, code as answer, put, put_if};
use crate::client::{self, Call, Reply};
use crate::state::contexts;
use crate::state::functions::Function;
use crate::state::memory::Allocation;

/// Bytes of a code image in one command.
const PART: usize = 96 << 10;

/// Sends a code image's bytes ahead of the command that loads it: for each part its length, then all bytes. Returns
/// the number under which the worker has it.
///
/// # Safety
/// `image` is what a program may pass to `cuModuleLoadData`.
unsafe fn send_image(image: *const c_void) -> Result<u64, CUresult> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    if image.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    let extent = unsafe { code::image_extent(image.cast()) }.map_err(|_| CUDA_ERROR_INVALID_IMAGE)?;
    let mut head = (extent.parts.len() as u64).to_le_bytes().to_vec();
    for part in &extent.parts {
        head.extend_from_slice(&(part.len as u64).to_le_bytes());
    }
    // SAFETY: the parts lie in the program's image, which stays while this call runs.
    let parts = extent.parts.iter().map(|p| unsafe { p.as_slice() });
    let total: usize = head.len() + extent.parts.iter().map(|p| p.len).sum::<usize>();
    let number = NEXT.fetch_add(1, Relaxed);
    let mut offset = 0;
    for piece in std::iter::once(&head[..]).chain(parts).flat_map(|bytes| bytes.chunks(PART)) {
        let mut call = Call::new(CODE_PART)?;
        call.word(number);
        call.word(offset as u64);
        call.word(total as u64);
        call.blob(piece);
        check(call.send())?;
        offset += piece.len();
    }
    Ok(number)
}

/// # Safety
/// `image` is what a program may pass to `cuModuleLoadData`, and `out` null or writable.
unsafe fn load(call: u16, kind: Kind, out: *mut u64, image: *const c_void) -> Result<(), CUresult> {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if kind == Kind::Module {
        client::get()?.contexts.current()?;
    }
    // SAFETY: the caller's promise.
    let number = unsafe { send_image(image) }?;
    let mut call = Call::new(call)?;
    let handle = call.fresh_handle(kind);
    call.word(number);
    call.blob(&[]);
    check(call.wait().0)?;
    // SAFETY: not null, so writable by the caller's promise.
    unsafe { put(out, handle) }
}

/// Reads a file that the caller names by its own path, with a NUL after it in case it is PTX.
///
/// # Safety
/// `name` is null or a C string.
unsafe fn read_file(name: *const c_char) -> Result<Vec<u8>, CUresult> {
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
    answer(unsafe { load(MODULE_LOAD, Kind::Module, module, image) })
}

/// Options that are out parameters: sizes of log buffers, which get 0 written, since nothing is logged.
/// `CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES` and `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
const LOG_SIZES: [u32; 2] = [4, 6];

pub(crate) unsafe fn cuModuleLoadDataEx(
    module: *mut CUmodule,
    image: *const c_void,
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
) -> CUresult {
    if count > 0 && (options.is_null() || values.is_null()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for i in 0..count as usize {
        // SAFETY: cuda.h has both arrays hold `count` elements.
        unsafe {
            if LOG_SIZES.contains(&*options.add(i)) {
                *values.add(i) = std::ptr::null_mut();
            }
        }
    }
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuModuleLoadData(module, image) }
}

pub(crate) unsafe fn cuModuleLoadFatBinary(module: *mut CUmodule, image: *const c_void) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuModuleLoadData(module, image) }
}

pub(crate) unsafe fn cuModuleLoad(module: *mut CUmodule, name: *const c_char) -> CUresult {
    // SAFETY: the caller's promise by cuda.h; the bytes outlive the load.
    answer(
        unsafe { read_file(name) }
            .and_then(|bytes| unsafe { load(MODULE_LOAD, Kind::Module, module, bytes.as_ptr().cast()) }),
    )
}

pub(crate) unsafe fn cuLibraryLoadData(
    library: *mut CUlibrary,
    image: *const c_void,
    _jit_options: *mut u32,
    _jit_values: *mut *mut c_void,
    _jit_count: u32,
    _options: *mut u32,
    _values: *mut *mut c_void,
    _count: u32,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    answer(unsafe { load(LIBRARY_LOAD, Kind::Library, library, image) })
}

pub(crate) unsafe fn cuLibraryLoadFromFile(
    library: *mut CUlibrary,
    name: *const c_char,
    _jit_options: *mut u32,
    _jit_values: *mut *mut c_void,
    _jit_count: u32,
    _options: *mut u32,
    _values: *mut *mut c_void,
    _count: u32,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h; the bytes outlive the load.
    answer(
        unsafe { read_file(name) }
            .and_then(|bytes| unsafe { load(LIBRARY_LOAD, Kind::Library, library, bytes.as_ptr().cast()) }),
    )
}

fn unload(call: u16, kind: Kind, handle: u64) -> CUresult {
    answer(client::get().and_then(|client| {
        if !kind.owns(handle) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let mut call = Call::new(call)?;
        call.word(handle);
        check(call.wait().0)?;
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
    let handle = call.fresh_handle(kind);
    call.word(parent);
    call.writer().text(name);
    let (result, mut reply) = call.wait();
    check(result)?;
    let params = parameter_layout(&mut reply)?;
    let context = if kind == Kind::Function { contexts::current() } else { 0 };
    client.functions.insert(handle, Arc::new(Function::new(name.to_owned(), parent, context, params)));
    // SAFETY: as above.
    unsafe { put(out, handle) }
}

pub(crate) unsafe fn cuModuleGetFunction(out: *mut CUfunction, module: CUmodule, name: *const c_char) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    answer(unsafe { find(MODULE_FUNCTION, Kind::Function, out, module, name) })
}

pub(crate) unsafe fn cuLibraryGetKernel(out: *mut CUkernel, library: CUlibrary, name: *const c_char) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    answer(unsafe { find(LIBRARY_KERNEL, Kind::Kernel, out, library, name) })
}

/// The name under which a kernel's function in a context is remembered: the kernel is its parent, and a kernel has one
/// function in each context.
fn function_key(context: CUcontext) -> CString {
    CString::new(format!("{context:x}")).unwrap_or_default()
}

pub(crate) unsafe fn cuKernelGetFunction(out: *mut CUfunction, kernel: CUkernel) -> CUresult {
    answer(client::get().and_then(|client| {
        let known = client.functions.get(kernel).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        let (context, _) = client.contexts.current()?;
        let key = function_key(context);
        let handle = match client.functions.find(kernel, &key) {
            Some(handle) => handle,
            None => {
                let mut call = Call::in_context(KERNEL_FUNCTION)?;
                let handle = call.fresh_handle(Kind::Function);
                call.word(kernel);
                check(call.wait().0)?;
                client.functions.insert(handle, Arc::new(Function::new(key, kernel, context, known.params.clone())));
                handle
            }
        };
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(out, handle) }
    }))
}

pub(crate) unsafe fn cuLibraryGetModule(out: *mut CUmodule, library: CUlibrary) -> CUresult {
    answer(Call::in_context(LIBRARY_MODULE).and_then(|mut call| {
        let handle = call.fresh_handle(Kind::Module);
        call.word(library);
        check(call.wait().0)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(out, handle) }
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
    let client = client::get()?;
    let (context, known) = client.contexts.current()?;
    let mut call = Call::new(call)?;
    call.word(parent);
    // SAFETY: the caller's promise.
    unsafe { call.text(name) }?;
    let (result, mut reply) = call.wait();
    check(result)?;
    let (base, size) = (reply.word().ok_or(CUDA_ERROR_UNKNOWN)?, reply.word().ok_or(CUDA_ERROR_UNKNOWN)?);
    client.memory.insert(Allocation::Global { base, size, device: known.device, context });
    // SAFETY: the caller's promise.
    unsafe {
        put_if(address, base);
        put_if(bytes, size as usize);
    }
    Ok(())
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
    _address: *mut CUdeviceptr,
    _bytes: *mut usize,
    _library: CUlibrary,
    _name: *const c_char,
) -> CUresult {
    CUDA_ERROR_NOT_FOUND
}

/// The names of all kernels in a module or library.
fn kernel_names(parent: u64) -> Result<Vec<CString>, CUresult> {
    let mut names = Vec::new();
    loop {
        let mut call = Call::new(KERNEL_NAMES)?;
        call.word(parent);
        call.word(names.len() as u64);
        let (result, reply) = call.wait();
        check(result)?;
        let mut rest = reply.rest();
        let malformed = |_| CUDA_ERROR_UNKNOWN;
        let (total, count) = (rest.word().map_err(malformed)?, rest.word().map_err(malformed)?);
        for _ in 0..count {
            names.push(rest.text().map_err(malformed)?.to_owned());
        }
        if names.len() as u64 >= total || count == 0 {
            return Ok(names);
        }
    }
}

/// `cuModuleEnumerateFunctions`, all of them.
pub(crate) fn module_functions(module: CUmodule) -> Result<Vec<CUfunction>, CUresult> {
    kernel_names(module)?
        .iter()
        .map(|name| {
            let mut handle = 0;
            // SAFETY: a local, and a C string.
            unsafe { find(MODULE_FUNCTION, Kind::Function, &raw mut handle, module, name.as_ptr()) }.map(|()| handle)
        })
        .collect()
}

pub(crate) unsafe fn cuModuleGetFunctionCount(count: *mut u32, module: CUmodule) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    answer(kernel_names(module).and_then(|names| unsafe { put(count, names.len() as u32) }))
}

pub(crate) unsafe fn cuModuleEnumerateFunctions(functions: *mut CUfunction, count: u32, module: CUmodule) -> CUresult {
    answer(module_functions(module).and_then(|found| {
        for (i, handle) in found.into_iter().take(count as usize).enumerate() {
            // SAFETY: cuda.h has the array hold `count` elements.
            unsafe { put(functions.wrapping_add(i), handle) }?;
        }
        Ok(())
    }))
}

pub(crate) unsafe fn cuLibraryGetKernelCount(count: *mut u32, library: CUlibrary) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    answer(kernel_names(library).and_then(|names| unsafe { put(count, names.len() as u32) }))
}

pub(crate) unsafe fn cuLibraryEnumerateKernels(kernels: *mut CUkernel, count: u32, library: CUlibrary) -> CUresult {
    answer(kernel_names(library).and_then(|names| {
        for (i, name) in names.iter().take(count as usize).enumerate() {
            // SAFETY: cuda.h has the array hold `count` elements.
            unsafe { find(LIBRARY_KERNEL, Kind::Kernel, kernels.wrapping_add(i), library, name.as_ptr()) }?;
        }
        Ok(())
    }))
}

/// # Safety
/// `out` is null or writable.
unsafe fn name_of(out: *mut *const c_char, handle: u64) -> CUresult {
    answer(client::get().and_then(|client| {
        let function = client.functions.get(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        // A kernel's function has the kernel's name.
        let named = client.functions.get(function.parent).unwrap_or(function);
        // SAFETY: the caller's promise. The name lives until the function is forgotten, as in the driver.
        unsafe { put(out, named.name.as_ptr()) }
    }))
}

pub(crate) unsafe fn cuKernelGetName(name: *mut *const c_char, kernel: CUkernel) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { name_of(name, kernel) }
}

pub(crate) unsafe fn cuFuncGetName(name: *mut *const c_char, function: CUfunction) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { name_of(name, function) }
}

pub(crate) unsafe fn cuFuncGetModule(module: *mut CUmodule, function: CUfunction) -> CUresult {
    answer(client::get().and_then(|client| {
        let known = client.functions.get(function).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        match client.functions.get(known.parent) {
            // SAFETY: the caller's promise by cuda.h.
            None => unsafe { put(module, known.parent) },
            // SAFETY: as above.
            Some(kernel) => check(unsafe { cuLibraryGetModule(module, kernel.parent) }),
        }
    }))
}

pub(crate) unsafe fn cuKernelGetLibrary(library: *mut CUlibrary, kernel: CUkernel) -> CUresult {
    answer(client::get().and_then(|client| {
        let known = client.functions.get(kernel).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        // SAFETY: the caller's promise by cuda.h.
        unsafe { put(library, known.parent) }
    }))
}

/// # Safety
/// `offset` and `size` are null or writable.
unsafe fn parameter(handle: u64, index: usize, offset: *mut usize, size: *mut usize) -> CUresult {
    answer(client::get().and_then(|client| {
        let known = client.functions.get(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        let &(o, s) = known.params.get(index).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: the caller's promise.
        unsafe {
            put(offset, o as usize)?;
            put_if(size, s as usize);
        }
        Ok(())
    }))
}

pub(crate) unsafe fn cuFuncGetParamInfo(
    function: CUfunction,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { parameter(function, index, offset, size) }
}

pub(crate) unsafe fn cuKernelGetParamInfo(
    kernel: CUkernel,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { parameter(kernel, index, offset, size) }
}

/// A function or kernel that is about to be launched in the current context.
pub(super) fn known(handle: u64) -> Result<Arc<Function>, CUresult> {
    let client = client::get()?;
    if contexts::current() == 0 {
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    }
    client.functions.get(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)
}

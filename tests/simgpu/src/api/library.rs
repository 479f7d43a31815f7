//! Libraries and their kernels.

use std::ffi::{c_char, c_void};

use rekindle_cuda_abi::arguments::{Out, Text};
use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_VALUE, CUdevice, CUdeviceptr, CUfunction, CUkernel, CUlibrary, CUmodule, CUresult,
};

use crate::current;
use crate::handles;
use crate::image;
use crate::library::{Code, Kernel, Library, code, function_in};
use crate::module::attribute_of;
use crate::status::{Result, ensure, put, status, utf8};

pub unsafe fn cuLibraryLoadData(
    out: Out<CUlibrary>,
    code: *const c_void,
    options: *mut u32,
    values: *mut *mut c_void,
    count: u32,
    _library_options: *mut u32,
    _library_values: *mut *mut c_void,
    _library_count: u32,
) -> CUresult {
    status(|| {
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: null or an image, and options, by the caller's promise.
        let image = unsafe { image::answer(image::load(code.cast()), count, options, values) }?;
        out.put(Library::load(image).handle)
    })
}

pub unsafe fn cuLibraryLoadFromFile(
    out: Out<CUlibrary>,
    path: Text,
    options: *mut u32,
    values: *mut *mut c_void,
    count: u32,
    _library_options: *mut u32,
    _library_values: *mut *mut c_void,
    _library_count: u32,
) -> CUresult {
    status(|| {
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let loaded = image::load_file(utf8(path)?);
        // SAFETY: options by the caller's promise.
        let image = unsafe { image::answer(loaded, count, options, values) }?;
        out.put(Library::load(image).handle)
    })
}

pub fn cuLibraryUnload(library: CUlibrary) -> CUresult {
    status(|| {
        handles::get::<Library>(library)?.unload();
        Ok(())
    })
}

pub fn cuLibraryGetKernel(out: Out<CUkernel>, library: CUlibrary, name: Text) -> CUresult {
    status(|| {
        let kernel = handles::get::<Library>(library)?.kernel(utf8(name)?)?;
        out.put(kernel.handle)
    })
}

pub fn cuLibraryGetKernelCount(count: Out<u32>, library: CUlibrary) -> CUresult {
    status(|| count.put(handles::get::<Library>(library)?.kernels().len() as u32))
}

pub unsafe fn cuLibraryEnumerateKernels(out: *mut CUkernel, room: u32, library: CUlibrary) -> CUresult {
    status(|| {
        let library = handles::get::<Library>(library)?;
        ensure(room > 0 && !out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        for (i, kernel) in library.kernels().iter().take(room as usize).enumerate() {
            // SAFETY: not null, so with as much room as the caller says.
            unsafe { put(out.add(i), kernel.handle) }?;
        }
        Ok(())
    })
}

pub fn cuLibraryGetModule(out: Out<CUmodule>, library: CUlibrary) -> CUresult {
    status(|| {
        let module = handles::get::<Library>(library)?.module(&current::healthy()?)?;
        out.put(module.handle)
    })
}

pub fn cuLibraryGetGlobal(address: Out<CUdeviceptr>, bytes: Out<usize>, library: CUlibrary, name: Text) -> CUresult {
    status(|| {
        let module = handles::get::<Library>(library)?.module(&current::healthy()?)?;
        let variable = module.global(utf8(name)?)?;
        address.put_if(variable.address);
        bytes.put_if(variable.size as usize);
        Ok(())
    })
}

/// Needs no context.
pub fn cuLibraryGetManaged(address: Out<CUdeviceptr>, bytes: Out<usize>, library: CUlibrary, name: Text) -> CUresult {
    status(|| {
        let library = handles::get::<Library>(library)?;
        ensure(!address.is_null() || !bytes.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let variable = library.managed_variable(utf8(name)?)?;
        address.put_if(variable.address);
        bytes.put_if(variable.size as usize);
        Ok(())
    })
}

/// No device has unified function pointers.
pub fn cuLibraryGetUnifiedFunction(pointer: Out<*mut c_void>, library: CUlibrary, symbol: Text) -> CUresult {
    status(|| {
        handles::get::<Library>(library)?;
        ensure(!pointer.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        symbol.read()?;
        Err(CUDA_ERROR_INVALID_VALUE)
    })
}

pub fn cuKernelGetFunction(out: Out<CUfunction>, kernel: CUkernel) -> CUresult {
    status(|| out.put(function_in(&current::healthy()?, kernel)?.handle))
}

pub fn cuKernelGetLibrary(out: Out<CUlibrary>, kernel: CUkernel) -> CUresult {
    status(|| out.put(handles::get::<Kernel>(kernel)?.library))
}

pub fn cuKernelGetName(name: Out<*const c_char>, kernel: CUkernel) -> CUresult {
    status(|| match code(not_null(kernel)?)? {
        // The text lives as long as the library.
        Code::Kernel(kernel) => name.put(kernel.name.as_ptr()),
        Code::Function(function) => name.put(function.name.as_ptr()),
    })
}

/// Checks a handle. Null is a wrong value for calls with a function or kernel.
pub(super) fn not_null(handle: u64) -> Result<u64> {
    ensure(handle != 0, CUDA_ERROR_INVALID_VALUE).map(|()| handle)
}

/// Offset and size of a parameter.
pub(super) fn parameter(
    kernel: &rekindle_ptx::Kernel,
    index: usize,
    offset: Out<usize>,
    size: Out<usize>,
) -> Result<()> {
    let param = kernel.params.get(index).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    offset.put(param.offset as usize)?;
    size.put_if(param.size as usize);
    Ok(())
}

pub fn cuKernelGetParamInfo(kernel: CUkernel, index: usize, offset: Out<usize>, size: Out<usize>) -> CUresult {
    status(|| match code(not_null(kernel)?)? {
        Code::Kernel(kernel) => parameter(&kernel.declared, index, offset, size),
        Code::Function(function) => parameter(&function.kernel, index, offset, size),
    })
}

pub fn cuKernelGetAttribute(value: Out<i32>, attribute: u32, kernel: CUkernel, dev: CUdevice) -> CUresult {
    status(|| {
        let device = crate::device::device(dev)?;
        let number = match code(kernel)? {
            Code::Kernel(kernel) => {
                let settings = kernel.settings.get(device.ordinal).ok_or(CUDA_ERROR_INVALID_VALUE)?;
                attribute_of(&kernel.declared, kernel.target, settings, attribute)?
            }
            Code::Function(function) => function.attribute(attribute)?,
        };
        value.put(number)
    })
}

pub fn cuKernelSetAttribute(attribute: u32, value: i32, kernel: CUkernel, dev: CUdevice) -> CUresult {
    status(|| {
        let device = crate::device::device(dev)?;
        match code(kernel)? {
            Code::Kernel(kernel) => {
                let settings = kernel.settings.get(device.ordinal).ok_or(CUDA_ERROR_INVALID_VALUE)?;
                settings.set(&kernel.declared, attribute, value)
            }
            Code::Function(function) => function.settings.set(&function.kernel, attribute, value),
        }
    })
}

pub fn cuKernelSetCacheConfig(kernel: CUkernel, config: u32, dev: CUdevice) -> CUresult {
    status(|| {
        crate::device::device(dev)?;
        handles::any(kernel)?;
        ensure(config <= 3, CUDA_ERROR_INVALID_VALUE)
    })
}

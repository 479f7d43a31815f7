//! Libraries and their kernels.

use std::ffi::{c_char, c_void};

use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND, CUdevice, CUdeviceptr, CUfunction, CUkernel, CUlibrary, CUmodule,
    CUresult,
};

use crate::current;
use crate::handles;
use crate::image;
use crate::library::{Code, Kernel, Library, code, function_in};
use crate::module::attribute_of;
use crate::status::{Result, ensure, put, put_if, status, text};

pub unsafe fn cuLibraryLoadData(
    out: *mut CUlibrary,
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
        let image = unsafe { image::answer(image::load(code.cast()), count, options, values) }?;
        unsafe { put(out, Library::load(image).handle) }
    })
}

pub unsafe fn cuLibraryLoadFromFile(
    out: *mut CUlibrary,
    path: *const c_char,
    options: *mut u32,
    values: *mut *mut c_void,
    count: u32,
    _library_options: *mut u32,
    _library_values: *mut *mut c_void,
    _library_count: u32,
) -> CUresult {
    status(|| {
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let loaded = image::load_file(unsafe { text(path) }?);
        let image = unsafe { image::answer(loaded, count, options, values) }?;
        unsafe { put(out, Library::load(image).handle) }
    })
}

pub unsafe fn cuLibraryUnload(library: CUlibrary) -> CUresult {
    status(|| {
        handles::get::<Library>(library)?.unload();
        Ok(())
    })
}

pub unsafe fn cuLibraryGetKernel(out: *mut CUkernel, library: CUlibrary, name: *const c_char) -> CUresult {
    status(|| {
        let kernel = handles::get::<Library>(library)?.kernel(unsafe { text(name) }?)?;
        unsafe { put(out, kernel.handle) }
    })
}

pub unsafe fn cuLibraryGetKernelCount(count: *mut u32, library: CUlibrary) -> CUresult {
    status(|| unsafe { put(count, handles::get::<Library>(library)?.kernels().len() as u32) })
}

pub unsafe fn cuLibraryEnumerateKernels(out: *mut CUkernel, room: u32, library: CUlibrary) -> CUresult {
    status(|| {
        let library = handles::get::<Library>(library)?;
        ensure(room > 0 && !out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        for (i, kernel) in library.kernels().iter().take(room as usize).enumerate() {
            unsafe { put(out.add(i), kernel.handle) }?;
        }
        Ok(())
    })
}

pub unsafe fn cuLibraryGetModule(out: *mut CUmodule, library: CUlibrary) -> CUresult {
    status(|| {
        let module = handles::get::<Library>(library)?.module(&current::healthy()?)?;
        unsafe { put(out, module.handle) }
    })
}

pub unsafe fn cuLibraryGetGlobal(
    address: *mut CUdeviceptr,
    bytes: *mut usize,
    library: CUlibrary,
    name: *const c_char,
) -> CUresult {
    status(|| {
        let module = handles::get::<Library>(library)?.module(&current::healthy()?)?;
        let variable = module.global(unsafe { text(name) }?)?;
        unsafe {
            put_if(address, variable.address);
            put_if(bytes, variable.size as usize);
        }
        Ok(())
    })
}

/// There are no managed variables.
pub unsafe fn cuLibraryGetManaged(
    _address: *mut CUdeviceptr,
    _bytes: *mut usize,
    library: CUlibrary,
    _name: *const c_char,
) -> CUresult {
    handles::get::<Library>(library).err().unwrap_or(CUDA_ERROR_NOT_FOUND)
}

pub unsafe fn cuKernelGetFunction(out: *mut CUfunction, kernel: CUkernel) -> CUresult {
    status(|| unsafe { put(out, function_in(&current::healthy()?, kernel)?.handle) })
}

pub unsafe fn cuKernelGetLibrary(out: *mut CUlibrary, kernel: CUkernel) -> CUresult {
    status(|| unsafe { put(out, handles::get::<Kernel>(kernel)?.library) })
}

pub unsafe fn cuKernelGetName(name: *mut *const c_char, kernel: CUkernel) -> CUresult {
    status(|| match code(not_null(kernel)?)? {
        // The text lives as long as the library.
        Code::Kernel(kernel) => unsafe { put(name, kernel.name.as_ptr()) },
        Code::Function(function) => unsafe { put(name, function.name.as_ptr()) },
    })
}

/// Null is a wrong value to the calls that ask with a function or kernel.
pub(super) fn not_null(handle: u64) -> Result<u64> {
    ensure(handle != 0, CUDA_ERROR_INVALID_VALUE).map(|()| handle)
}

/// Offset and size of a parameter.
pub(super) unsafe fn parameter(
    kernel: &rekindle_ptx::Kernel,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> Result<()> {
    let param = kernel.params.get(index).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    unsafe {
        put(offset, param.offset as usize)?;
        put_if(size, param.size as usize);
    }
    Ok(())
}

pub unsafe fn cuKernelGetParamInfo(kernel: CUkernel, index: usize, offset: *mut usize, size: *mut usize) -> CUresult {
    status(|| match code(not_null(kernel)?)? {
        Code::Kernel(kernel) => unsafe { parameter(&kernel.declared, index, offset, size) },
        Code::Function(function) => unsafe { parameter(&function.kernel, index, offset, size) },
    })
}

pub unsafe fn cuKernelGetAttribute(value: *mut i32, attribute: u32, kernel: CUkernel, dev: CUdevice) -> CUresult {
    status(|| {
        let device = crate::device::device(dev)?;
        let number = match code(kernel)? {
            Code::Kernel(kernel) => {
                let settings = kernel.settings.get(device.ordinal).ok_or(CUDA_ERROR_INVALID_VALUE)?;
                attribute_of(&kernel.declared, kernel.target, settings, attribute)?
            }
            Code::Function(function) => function.attribute(attribute)?,
        };
        unsafe { put(value, number) }
    })
}

pub unsafe fn cuKernelSetAttribute(attribute: u32, value: i32, kernel: CUkernel, dev: CUdevice) -> CUresult {
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

pub unsafe fn cuKernelSetCacheConfig(kernel: CUkernel, config: u32, dev: CUdevice) -> CUresult {
    status(|| {
        crate::device::device(dev)?;
        handles::any(kernel)?;
        ensure(config <= 3, CUDA_ERROR_INVALID_VALUE)
    })
}

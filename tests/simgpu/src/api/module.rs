//! Modules.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_PERMITTED, CUdeviceptr, CUfunction, CUmodule, CUresult,
};

use crate::image::{self, Image};
use crate::module::Module;
use crate::status::{Result, ensure, put, put_if, status, text};
use crate::{current, handles};

unsafe fn load(out: *mut CUmodule, image: &Arc<Image>) -> Result<()> {
    let context = current::healthy()?;
    context.flush_prints();
    let module = Module::load(&context, image, false, |_| None)?;
    unsafe { put(out, module.handle) }
}

pub unsafe fn cuModuleLoadDataEx(
    out: *mut CUmodule,
    image: *const c_void,
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
) -> CUresult {
    status(|| {
        current::healthy()?;
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let image: Arc<Image> = unsafe { image::answer(image::load(image.cast()), count, options, values) }?;
        unsafe { load(out, &image) }
    })
}

pub unsafe fn cuModuleLoadData(out: *mut CUmodule, image: *const c_void) -> CUresult {
    unsafe { cuModuleLoadDataEx(out, image, 0, std::ptr::null_mut(), std::ptr::null_mut()) }
}

pub unsafe fn cuModuleLoadFatBinary(out: *mut CUmodule, image: *const c_void) -> CUresult {
    unsafe { cuModuleLoadData(out, image) }
}

pub unsafe fn cuModuleLoad(out: *mut CUmodule, path: *const c_char) -> CUresult {
    status(|| {
        current::healthy()?;
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let image = image::load_file(unsafe { text(path) }?).map_err(|error| error.code)?;
        unsafe { load(out, &image) }
    })
}

pub unsafe fn cuModuleUnload(module: CUmodule) -> CUresult {
    status(|| {
        let context = current::healthy()?;
        let module = handles::get::<Module>(module)?;
        ensure(!module.of_library, CUDA_ERROR_NOT_PERMITTED)?;
        context.synchronize()?;
        module.unload();
        Ok(())
    })
}

pub unsafe fn cuModuleGetFunction(out: *mut CUfunction, module: CUmodule, name: *const c_char) -> CUresult {
    status(|| {
        let module = handles::get::<Module>(module)?;
        module.context.upgrade().map_or(Ok(()), |context| context.check())?;
        let name = unsafe { text(name) }?;
        ensure(!name.is_empty(), CUDA_ERROR_INVALID_VALUE)?;
        let function = module.function(name)?;
        unsafe { put(out, function.handle) }
    })
}

pub unsafe fn cuModuleGetFunctionCount(count: *mut u32, module: CUmodule) -> CUresult {
    status(|| unsafe { put(count, handles::get::<Module>(module)?.functions().len() as u32) })
}

pub unsafe fn cuModuleEnumerateFunctions(out: *mut CUfunction, room: u32, module: CUmodule) -> CUresult {
    status(|| {
        let module = handles::get::<Module>(module)?;
        ensure(room > 0 && !out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        for (i, function) in module.functions().iter().take(room as usize).enumerate() {
            unsafe { put(out.add(i), function.handle) }?;
        }
        Ok(())
    })
}

pub unsafe fn cuModuleGetGlobal_v2(
    address: *mut CUdeviceptr,
    bytes: *mut usize,
    module: CUmodule,
    name: *const c_char,
) -> CUresult {
    status(|| {
        let (module, name) = (handles::get::<Module>(module)?, unsafe { text(name) }?);
        // What is a kernel's name is a wrong value, not one that is not found.
        ensure(module.function(name).is_err(), CUDA_ERROR_INVALID_VALUE)?;
        let variable = module.global(name)?;
        unsafe {
            put_if(address, variable.address);
            put_if(bytes, variable.size as usize);
        }
        Ok(())
    })
}

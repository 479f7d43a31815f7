//! Modules.

use std::ffi::c_void;
use std::sync::Arc;

use rekindle_cuda_abi::arguments::{Out, Text};
use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_PERMITTED, CUdeviceptr, CUfunction, CUmodule, CUresult,
};

use crate::image::{self, Image};
use crate::module::Module;
use crate::status::{Result, ensure, put, status, utf8};
use crate::{current, handles};

fn load(out: Out<CUmodule>, image: &Arc<Image>) -> Result<()> {
    let context = current::healthy()?;
    context.flush_prints();
    let module = Module::load(&context, image, None, |_| None)?;
    out.put(module.handle)
}

pub unsafe fn cuModuleLoadDataEx(
    out: Out<CUmodule>,
    image: *const c_void,
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
) -> CUresult {
    status(|| {
        current::healthy()?;
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: null or an image, and options, by the caller's promise.
        let image: Arc<Image> = unsafe { image::answer(image::load(image.cast()), count, options, values) }?;
        load(out, &image)
    })
}

pub unsafe fn cuModuleLoadData(out: Out<CUmodule>, image: *const c_void) -> CUresult {
    // SAFETY: the arguments of this call, and no options.
    unsafe { cuModuleLoadDataEx(out, image, 0, std::ptr::null_mut(), std::ptr::null_mut()) }
}

pub unsafe fn cuModuleLoadFatBinary(out: Out<CUmodule>, image: *const c_void) -> CUresult {
    // SAFETY: the arguments of this call.
    unsafe { cuModuleLoadData(out, image) }
}

pub fn cuModuleLoad(out: Out<CUmodule>, path: Text) -> CUresult {
    status(|| {
        current::healthy()?;
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let image = image::load_file(utf8(path)?).map_err(|error| error.code)?;
        load(out, &image)
    })
}

pub fn cuModuleUnload(module: CUmodule) -> CUresult {
    status(|| {
        let context = current::healthy()?;
        let module = handles::get::<Module>(module)?;
        ensure(!module.of_library, CUDA_ERROR_NOT_PERMITTED)?;
        context.synchronize()?;
        module.unload();
        Ok(())
    })
}

pub fn cuModuleGetFunction(out: Out<CUfunction>, module: CUmodule, name: Text) -> CUresult {
    status(|| {
        let module = handles::get::<Module>(module)?;
        module.context.upgrade().map_or(Ok(()), |context| context.check())?;
        let name = utf8(name)?;
        ensure(!name.is_empty(), CUDA_ERROR_INVALID_VALUE)?;
        let function = module.function(name)?;
        out.put(function.handle)
    })
}

pub fn cuModuleGetFunctionCount(count: Out<u32>, module: CUmodule) -> CUresult {
    status(|| count.put(handles::get::<Module>(module)?.functions().len() as u32))
}

pub unsafe fn cuModuleEnumerateFunctions(out: *mut CUfunction, room: u32, module: CUmodule) -> CUresult {
    status(|| {
        let module = handles::get::<Module>(module)?;
        ensure(room > 0 && !out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        for (i, function) in module.functions().iter().take(room as usize).enumerate() {
            // SAFETY: not null, so with as much room as the caller says.
            unsafe { put(out.add(i), function.handle) }?;
        }
        Ok(())
    })
}

pub fn cuModuleGetGlobal_v2(address: Out<CUdeviceptr>, bytes: Out<usize>, module: CUmodule, name: Text) -> CUresult {
    status(|| {
        let (module, name) = (handles::get::<Module>(module)?, utf8(name)?);
        // The name of a kernel is a wrong value, not a name that is not found.
        ensure(module.function(name).is_err(), CUDA_ERROR_INVALID_VALUE)?;
        let variable = module.global(name)?;
        address.put_if(variable.address);
        bytes.put_if(variable.size as usize);
        Ok(())
    })
}

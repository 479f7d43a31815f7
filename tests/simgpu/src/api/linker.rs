//! The linker. Its output is one text of PTX, which loads wherever a real linker's machine code does.

use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use rekindle_cuda_abi::arguments::Out;
use rekindle_cuda_abi::code;
use rekindle_cuda_abi::jit::{
    CU_JIT_INPUT_CUBIN, CU_JIT_INPUT_FATBINARY, CU_JIT_INPUT_LIBRARY, CU_JIT_INPUT_OBJECT, CU_JIT_INPUT_PTX,
    INPUTS_END, JitOptions,
};
use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_PTX, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NO_BINARY_FOR_GPU,
    CUDA_ERROR_NOT_SUPPORTED, CUresult,
};

use crate::current;
use crate::handles::{self, Object};
use crate::image::{self, Unloadable, write_logs};
use crate::merge::merge;
use crate::status::{Result, ensure, status, text};

/// A linker.
#[derive(Debug, Default)]
pub(crate) struct Link(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    texts: Vec<String>,
    /// The caller's options, which stay for as long as the linker does.
    options: JitOptions,
    errors: String,
    output: Vec<u8>,
}

impl Object for Link {}

fn link(handle: u64) -> Result<Arc<Link>> {
    handles::get(handle)
}

impl State {
    /// Records an error, and writes it where the caller's options ask for it.
    fn tell(&mut self, result: std::result::Result<(), Unloadable>) -> Result<()> {
        if let Err(error) = &result {
            self.errors.push_str(&error.text);
            self.errors.push('\n');
        }
        // SAFETY: the options are those of the linker, which `cuda.h` has stay until it is destroyed.
        unsafe { write_logs(&self.errors, &self.options) };
        result.map_err(|error| error.code)
    }
}

/// The PTX in an object file of nvcc, or in a library of object files.
fn inside(bytes: &[u8]) -> std::result::Result<Vec<String>, Unloadable> {
    let magic = code::FATBIN_MAGIC.to_le_bytes();
    let places = bytes.windows(magic.len()).enumerate().filter(|(_, w)| *w == magic).map(|(at, _)| at);
    let found: Vec<String> = places.filter_map(|at| image::ptx_of(&bytes[at..]).ok()).collect();
    if found.is_empty() { Err(Unloadable::none()) } else { Ok(found) }
}

fn texts_of(kind: u32, bytes: &[u8]) -> std::result::Result<Vec<String>, Unloadable> {
    match kind {
        CU_JIT_INPUT_PTX => {
            let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
            let invalid = |error: String| Unloadable::new(CUDA_ERROR_INVALID_PTX, error);
            let text = std::str::from_utf8(&bytes[..end]).map_err(|e| invalid(e.to_string()))?;
            rekindle_ptx::Module::parse(text).map_err(|e| invalid(e.to_string()))?;
            Ok(vec![text.to_owned()])
        }
        CU_JIT_INPUT_CUBIN | CU_JIT_INPUT_FATBINARY => image::ptx_of(bytes).map(|text| vec![text]),
        CU_JIT_INPUT_OBJECT | CU_JIT_INPUT_LIBRARY => inside(bytes),
        _ => Err(Unloadable::new(CUDA_ERROR_NOT_SUPPORTED, "only PTX can be linked")),
    }
}

pub unsafe fn cuLinkCreate_v2(count: u32, options: *mut u32, values: *mut *mut c_void, state: Out<u64>) -> CUresult {
    status(|| {
        current::healthy()?;
        // SAFETY: null or arrays of so many elements, by the caller's promise.
        let options = unsafe { JitOptions::read(count, options, values) }?;
        let handle = handles::next();
        state.put(handle)?;
        let new = State { options, ..State::default() };
        handles::insert(handle, Arc::new(Link(Mutex::new(new))));
        Ok(())
    })
}

pub unsafe fn cuLinkAddData_v2(
    state: u64,
    kind: u32,
    data: *mut c_void,
    size: usize,
    _name: *const c_char,
    _count: u32,
    _options: *mut u32,
    _values: *mut *mut c_void,
) -> CUresult {
    status(|| {
        let link = link(state)?;
        ensure(!data.is_null() && size > 0 && kind < INPUTS_END, CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: not null, so that many bytes by the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), size) };
        let mut state = link.0.lock().unwrap_or_else(PoisonError::into_inner);
        let added = texts_of(kind, bytes).map(|texts| state.texts.extend(texts));
        state.tell(added)
    })
}

pub unsafe fn cuLinkAddFile_v2(
    state: u64,
    kind: u32,
    path: *const c_char,
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
) -> CUresult {
    // SAFETY: null or a text, by the caller's promise.
    let read = unsafe { text(path) }
        .and_then(|path| std::fs::read(path).map_err(|_| rekindle_cuda_abi::types::CUDA_ERROR_FILE_NOT_FOUND));
    match read {
        // SAFETY: the bytes are there, and the other arguments are those of this call.
        Ok(mut bytes) => unsafe {
            let data = bytes.as_mut_ptr().cast();
            cuLinkAddData_v2(state, kind, data, bytes.len(), path, count, options, values)
        },
        Err(error) => error,
    }
}

pub fn cuLinkComplete(state: u64, output: Out<*mut c_void>, size: Out<usize>) -> CUresult {
    status(|| {
        let link = link(state)?;
        ensure(!output.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let mut state = link.0.lock().unwrap_or_else(PoisonError::into_inner);
        let merged = match state.texts.is_empty() {
            true => Err(Unloadable::new(CUDA_ERROR_NO_BINARY_FOR_GPU, "nothing was added")),
            false => merge(&state.texts).map_err(|error| Unloadable::new(CUDA_ERROR_INVALID_IMAGE, error)),
        };
        let linked = merged.map(|text| {
            state.output = text.into_bytes();
            state.output.push(0);
        });
        state.tell(linked)?;
        output.put(state.output.as_mut_ptr().cast())?;
        size.put_if(state.output.len());
        Ok(())
    })
}

pub fn cuLinkDestroy(state: u64) -> CUresult {
    status(|| {
        link(state)?;
        handles::remove(state);
        Ok(())
    })
}

pub unsafe fn cuLinkCreate(count: u32, options: *mut u32, values: *mut *mut c_void, state: Out<u64>) -> CUresult {
    // SAFETY: the arguments of this call.
    unsafe { cuLinkCreate_v2(count, options, values, state) }
}

pub unsafe fn cuLinkAddData(
    state: u64,
    kind: u32,
    data: *mut c_void,
    size: usize,
    name: *const c_char,
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the arguments of this call.
    unsafe { cuLinkAddData_v2(state, kind, data, size, name, count, options, values) }
}

pub unsafe fn cuLinkAddFile(
    state: u64,
    kind: u32,
    path: *const c_char,
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the arguments of this call.
    unsafe { cuLinkAddFile_v2(state, kind, path, count, options, values) }
}

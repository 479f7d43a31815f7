//! The linker: the worker has the driver's, and what it puts together comes back into memory of this process.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Mutex;

use rekindle_cuda_abi::jit::{CU_JIT_INPUT_PTX, INPUTS_END};
use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{
    Kind, LINK_ADD, LINK_COMPLETE, LINK_CREATE, LINK_DESTROY, LINK_OUTPUT, LinkAdd, LinkCreate, LinkOutput, OfLinker,
};

use super::jit::Options;
use super::library::read_file;
use super::{check, code, put, put_if};
use crate::call::{Call, perform};
use crate::operations::code::send_parts;
use crate::state::client;

/// A linker of the program's: its options, whose logs every later call writes on, and its output.
#[derive(Default)]
struct Link {
    options: Options,
    output: Option<Box<[u8]>>,
}

static LINKS: Mutex<Option<HashMap<u64, Link>>> = Mutex::new(None);

fn with_links<T>(work: impl FnOnce(&mut HashMap<u64, Link>) -> T) -> Result<T, CUresult> {
    let mut links = LINKS.lock().map_err(|_| CUDA_ERROR_UNKNOWN)?;
    Ok(work(links.get_or_insert_default()))
}

fn options_of(state: u64) -> Result<Options, CUresult> {
    with_links(|links| links.get(&state).map(|l| l.options.clone()))?.ok_or(CUDA_ERROR_INVALID_HANDLE)
}

pub(crate) unsafe fn cuLinkCreate_v2(
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
    state: *mut c_void,
) -> CUresult {
    let create = || {
        if state.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller's promise by cuda.h.
        let options = unsafe { Options::read(count, options, values) }?;
        let mut call = Call::in_context(LINK_CREATE)?;
        let handle = client::get()?.fresh(Kind::Linker);
        call.put(&LinkCreate { linker: handle, options: &options.bytes() });
        check(call.wait().0)?;
        with_links(|links| links.insert(handle, Link { options, output: None }))?;
        // SAFETY: not null, writable by cuda.h's contract.
        unsafe { put(state.cast(), handle) }
    };
    code(create())
}

/// # Safety
/// `name` is null or a C string, the arrays are null or hold `count` elements.
unsafe fn add(
    state: u64,
    kind: u32,
    data: &[u8],
    name: *const c_char,
    (count, options, values): (u32, *mut u32, *mut *mut c_void),
) -> Result<(), CUresult> {
    let logs = options_of(state)?;
    if data.is_empty() || kind >= INPUTS_END {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    let own = unsafe { Options::read(count, options, values) }?;
    let image = send_parts(&[data])?;
    let mut call = Call::in_context(LINK_ADD)?;
    // SAFETY: not null, so a C string by the caller's promise.
    let name = if name.is_null() { c"" } else { unsafe { CStr::from_ptr(name) } };
    call.put(&LinkAdd { linker: state, kind, image, name, options: &own.bytes() });
    let (result, mut reply) = call.wait();
    logs.write_back(&mut reply);
    check(result)
}

pub(crate) unsafe fn cuLinkAddData_v2(
    state: u64,
    kind: u32,
    data: *mut c_void,
    size: usize,
    name: *const c_char,
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
) -> CUresult {
    if data.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, so `size` bytes by the caller's promise; the rest is its promise too.
    code(unsafe {
        let data = std::slice::from_raw_parts(data.cast::<u8>(), size);
        add(state, kind, data, name, (count, options, values))
    })
}

pub(crate) unsafe fn cuLinkAddFile_v2(
    state: u64,
    kind: u32,
    path: *const c_char,
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(unsafe { read_file(path) }.and_then(|mut bytes| {
        if kind != CU_JIT_INPUT_PTX {
            // Only a text ends in a NUL.
            bytes.pop();
        }
        // SAFETY: as above.
        unsafe { add(state, kind, &bytes, path, (count, options, values)) }
    }))
}

pub(crate) unsafe fn cuLinkComplete(state: u64, output: *mut *mut c_void, size: *mut usize) -> CUresult {
    let complete = || {
        let options = options_of(state)?;
        if output.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut call = Call::in_context(LINK_COMPLETE)?;
        call.put(&OfLinker { linker: state });
        let (result, mut reply) = call.wait();
        let length = reply.word().unwrap_or(0) as usize;
        options.write_back(&mut reply);
        check(result)?;
        let mut linked = Vec::new();
        while linked.len() < length {
            let mut call = Call::new(LINK_OUTPUT)?;
            call.put(&LinkOutput { linker: state, offset: linked.len() as u64 });
            let (result, reply) = call.wait();
            check(result)?;
            let part = reply.rest().blob().map_err(|_| CUDA_ERROR_UNKNOWN)?.to_vec();
            if part.is_empty() {
                return Err(CUDA_ERROR_UNKNOWN);
            }
            linked.extend_from_slice(&part);
        }
        with_links(|links| {
            let link = links.get_mut(&state).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
            let bytes = link.output.insert(linked.into_boxed_slice());
            // SAFETY: not null; the output stays until the linker is destroyed.
            unsafe {
                put(output, bytes.as_mut_ptr().cast())?;
                put_if(size, bytes.len());
            }
            Ok(())
        })?
    };
    code(complete())
}

pub(crate) unsafe fn cuLinkDestroy(state: u64) -> CUresult {
    let destroy = || {
        client::get()?;
        with_links(|links| links.remove(&state))?.ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        perform(LINK_DESTROY, &OfLinker { linker: state })
    };
    code(destroy())
}

pub(crate) unsafe fn cuLinkCreate(
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
    state: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuLinkCreate_v2(count, options, values, state) }
}

pub(crate) unsafe fn cuLinkAddData(
    state: u64,
    kind: u32,
    data: *mut c_void,
    size: usize,
    name: *const c_char,
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuLinkAddData_v2(state, kind, data, size, name, count, options, values) }
}

pub(crate) unsafe fn cuLinkAddFile(
    state: u64,
    kind: u32,
    path: *const c_char,
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    unsafe { cuLinkAddFile_v2(state, kind, path, count, options, values) }
}

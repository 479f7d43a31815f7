//! Memory and events that processes share.

use std::sync::Arc;

use rekindle_cuda_abi::types::{
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUdeviceptr, CUevent,
    CUipcEventHandle, CUipcMemHandle, CUresult,
};

use crate::current;
use crate::event::Event;
use crate::handles;
use crate::ipc_event::SharedEvent;
use crate::memory::ipc;
use crate::process;
use crate::status::{ensure, put, status};

pub unsafe fn cuIpcGetMemHandle(out: *mut CUipcMemHandle, pointer: CUdeviceptr) -> CUresult {
    // The driver looks at this first, before there is a context or it is initialized.
    if out.is_null() || pointer == 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    status(|| {
        process::initialized()?;
        current::healthy()?;
        unsafe { put(out, CUipcMemHandle { bytes: ipc::handle(pointer)? }) }
    })
}

pub unsafe fn cuIpcOpenMemHandle(out: *mut CUdeviceptr, handle: CUipcMemHandle, flags: u32) -> CUresult {
    unsafe { cuIpcOpenMemHandle_v2(out, handle, flags) }
}

pub unsafe fn cuIpcOpenMemHandle_v2(out: *mut CUdeviceptr, handle: CUipcMemHandle, flags: u32) -> CUresult {
    status(|| {
        let context = current::healthy()?;
        ensure(!out.is_null() && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUDA_ERROR_INVALID_VALUE)?;
        unsafe { put(out, ipc::open(&context, &handle.bytes)?) }
    })
}

pub unsafe fn cuIpcCloseMemHandle(pointer: CUdeviceptr) -> CUresult {
    status(|| {
        let context = current::healthy()?;
        context.synchronize()?;
        ipc::close(pointer)
    })
}

pub unsafe fn cuIpcGetEventHandle(out: *mut CUipcEventHandle, event: CUevent) -> CUresult {
    if out.is_null() || event == 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    status(|| {
        process::initialized()?;
        current::healthy()?;
        let event = handles::get::<Event>(event)?;
        let shared = event.shared().ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        unsafe { put(out, CUipcEventHandle { bytes: shared.handle() }) }
    })
}

pub unsafe fn cuIpcOpenEventHandle(out: *mut CUevent, handle: CUipcEventHandle) -> CUresult {
    status(|| {
        let context = current::healthy()?;
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let event = Event::open(Arc::downgrade(&context), SharedEvent::open(&handle.bytes)?);
        let handle = handles::next();
        handles::insert(handle, Arc::new(event));
        unsafe { put(out, handle) }
    })
}

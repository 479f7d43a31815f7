//! Memory and events that processes share.

use std::sync::Arc;

use rekindle_cuda_abi::arguments::Out;
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
use crate::status::{ensure, status};

pub fn cuIpcGetMemHandle(out: Out<CUipcMemHandle>, pointer: CUdeviceptr) -> CUresult {
    // The driver checks this first, even without a context or initialisation.
    if out.is_null() || pointer == 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    status(|| {
        process::initialized()?;
        current::healthy()?;
        out.put(CUipcMemHandle { bytes: ipc::handle(pointer)? })
    })
}

pub fn cuIpcOpenMemHandle(out: Out<CUdeviceptr>, handle: CUipcMemHandle, flags: u32) -> CUresult {
    cuIpcOpenMemHandle_v2(out, handle, flags)
}

pub fn cuIpcOpenMemHandle_v2(out: Out<CUdeviceptr>, handle: CUipcMemHandle, flags: u32) -> CUresult {
    status(|| {
        let context = current::healthy()?;
        ensure(!out.is_null() && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUDA_ERROR_INVALID_VALUE)?;
        out.put(ipc::open(&context, &handle.bytes)?)
    })
}

pub fn cuIpcCloseMemHandle(pointer: CUdeviceptr) -> CUresult {
    status(|| {
        let context = current::healthy()?;
        context.synchronize()?;
        ipc::close(pointer)
    })
}

pub fn cuIpcGetEventHandle(out: Out<CUipcEventHandle>, event: CUevent) -> CUresult {
    if out.is_null() || event == 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    status(|| {
        process::initialized()?;
        current::healthy()?;
        let event = handles::get::<Event>(event)?;
        let shared = event.shared().ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        out.put(CUipcEventHandle { bytes: shared.handle() })
    })
}

pub fn cuIpcOpenEventHandle(out: Out<CUevent>, handle: CUipcEventHandle) -> CUresult {
    status(|| {
        let context = current::healthy()?;
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let event = Event::open(Arc::downgrade(&context), SharedEvent::open(&handle.bytes)?);
        let handle = handles::next();
        handles::insert(handle, Arc::new(event));
        out.put(handle)
    })
}

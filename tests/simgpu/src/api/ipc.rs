//! Memory that processes share.

use rekindle_cuda_abi::types::{
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUDA_ERROR_INVALID_VALUE, CUdeviceptr, CUipcMemHandle, CUresult,
};

use crate::current;
use crate::memory::ipc;
use crate::status::{ensure, put, status};

pub unsafe fn cuIpcGetMemHandle(out: *mut CUipcMemHandle, pointer: CUdeviceptr) -> CUresult {
    status(|| {
        current::healthy()?;
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
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

//! Structures of CUDA graphs, with `cuda.h`'s shapes. Graphs, nodes and executable graphs are 64-bit handles.

#![allow(missing_docs, reason = "the names are cuda.h's, and documented there")]

use std::ffi::c_void;

use crate::shapes::CudaMemcpy3d;
use crate::types::{CUcontext, CUdeviceptr, CUfunction, CUkernel, CUlaunchAttribute, CUmemAccessDesc, CUstream};

pub type CUgraph = u64;
pub type CUgraphNode = u64;
pub type CUgraphExec = u64;
pub type CUuserObject = u64;
/// The number of a condition in its graph.
pub type CUgraphConditionalHandle = u64;

/// `CUgraphEdgeData`: what of a node another waits for. All zero: for its end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUgraphEdgeData {
    pub from_port: u8,
    pub to_port: u8,
    pub kind: u8,
    pub reserved: [u8; 5],
}

/// `CUlaunchAttributeValue`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUlaunchAttributeValue(pub [u64; 8]);

/// `CUDA_KERNEL_NODE_PARAMS_v1`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CudaKernelNodeParamsV1 {
    pub func: CUfunction,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub params: *mut *mut c_void,
    pub extra: *mut *mut c_void,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2` and `_v3`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CudaKernelNodeParams {
    pub v1: CudaKernelNodeParamsV1,
    pub kern: CUkernel,
    pub context: CUcontext,
}

/// `CUDA_MEMSET_NODE_PARAMS_v1`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaMemsetNodeParams {
    pub dst: CUdeviceptr,
    pub pitch: usize,
    pub value: u32,
    pub element: u32,
    pub width: usize,
    pub height: usize,
}

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaHostNodeParams {
    pub function: u64,
    pub data: u64,
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemPoolProps {
    pub kind: u32,
    pub handle_types: u32,
    pub location_type: u32,
    pub location_id: i32,
    pub security_attributes: u64,
    pub maximum: usize,
    pub usage: u16,
    pub reserved: [u8; 54],
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CudaMemAllocNodeParams {
    pub pool: CUmemPoolProps,
    pub access: *const CUmemAccessDesc,
    pub access_count: usize,
    pub bytes: usize,
    pub address: CUdeviceptr,
}

/// `CUstreamBatchMemOpParams`: a union of 48 bytes, of which the members about words begin alike.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUstreamBatchMemOpParams {
    pub operation: u32,
    /// Of flushes and barriers.
    pub flags_of_none: u32,
    pub address: CUdeviceptr,
    pub value: u64,
    pub flags: u32,
    pub rest: [u32; 5],
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CudaBatchMemOpNodeParams {
    pub context: CUcontext,
    pub count: u32,
    pub operations: *mut CUstreamBatchMemOpParams,
    pub flags: u32,
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaGraphInstantiateParams {
    pub flags: u64,
    pub upload_stream: CUstream,
    pub error_node: CUgraphNode,
    pub result: u32,
}

/// `CUgraphExecUpdateResultInfo`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUgraphExecUpdateResultInfo {
    pub result: u32,
    pub error_node: CUgraphNode,
    pub error_from_node: CUgraphNode,
}

/// `CUDA_MEMCPY_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CudaMemcpyNodeParams {
    pub flags: i32,
    pub reserved: i32,
    pub context: CUcontext,
    pub copy: CudaMemcpy3d,
}

/// `CUDA_CONDITIONAL_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CudaConditionalNodeParams {
    pub handle: CUgraphConditionalHandle,
    pub kind: u32,
    pub size: u32,
    /// The driver's list of the bodies, which it writes.
    pub bodies: *const CUgraph,
    pub context: CUcontext,
}

/// `CUgraphNodeParams`: a kind, and parameters in 29 words whose meaning depends on it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUgraphNodeParams {
    pub kind: u32,
    pub reserved: [i32; 3],
    pub words: [u64; 29],
    pub reserved_at_end: i64,
}

const _: () = {
    assert!(size_of::<CudaKernelNodeParams>() == 72 && size_of::<CudaMemsetNodeParams>() == 40);
    assert!(size_of::<CUmemPoolProps>() == 88 && size_of::<CudaMemAllocNodeParams>() == 120);
    assert!(size_of::<CUstreamBatchMemOpParams>() == 48 && size_of::<CudaBatchMemOpNodeParams>() == 32);
    assert!(size_of::<CudaMemcpyNodeParams>() == 216 && size_of::<CUgraphNodeParams>() == 256);
    assert!(size_of::<CudaConditionalNodeParams>() == 32);
    assert!(size_of::<CUlaunchAttribute>() == 72 && size_of::<CUgraphEdgeData>() == 8);
};

//! Generates the worker's typed entry points into the driver and its side of generated calls from the table of driver
//! functions; and the messages in which images keep its state.

use rekindle_cuda_abi::{build_script, generate};

/// The functions that the worker calls besides the calls of the table.
const ALSO: &[&str] = &[
    "cuInit",
    "cuGraphConditionalHandleCreate",
    "cuGraphAddNode_v2",
    "cuMemGetInfo_v2",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxReset_v2",
    "cuDevicePrimaryCtxSetFlags_v2",
    "cuCtxCreate_v2",
    "cuCtxDestroy_v2",
    "cuCtxSetCurrent",
    "cuCtxGetCurrent",
    "cuCtxPopCurrent_v2",
    "cuCtxSetFlags",
    "cuCtxGetApiVersion",
    "cuCtxGetStreamPriorityRange",
    "cuModuleGetLoadingMode",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuLinkCreate_v2",
    "cuLinkAddData_v2",
    "cuLinkComplete",
    "cuLinkDestroy",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuModuleGetGlobal_v2",
    "cuModuleGetFunctionCount",
    "cuModuleEnumerateFunctions",
    "cuFuncGetName",
    "cuFuncGetParamInfo",
    "cuLibraryLoadData",
    "cuLibraryUnload",
    "cuLibraryGetKernel",
    "cuLibraryGetModule",
    "cuLibraryGetGlobal",
    "cuLibraryGetKernelCount",
    "cuLibraryEnumerateKernels",
    "cuKernelGetFunction",
    "cuKernelGetName",
    "cuKernelGetParamInfo",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuLaunchCooperativeKernelMultiDevice",
    "cuOccupancyMaxPotentialBlockSizeWithFlags",
    "cuOccupancyMaxActiveClusters",
    "cuOccupancyMaxPotentialClusterSize",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemGetAllocationGranularity",
    "cuTensorMapEncodeTiled",
    "cuTensorMapEncodeIm2col",
    "cuTensorMapEncodeIm2colWide",
    "cuTensorMapReplaceAddress",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyAsync",
    "cuCtxEnablePeerAccess",
    "cuCtxDisablePeerAccess",
    "cuMemcpyPeerAsync",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuArray3DCreate_v2",
    "cuArrayDestroy",
    "cuMipmappedArrayCreate",
    "cuMipmappedArrayDestroy",
    "cuMipmappedArrayGetLevel",
    "cuTexObjectCreate",
    "cuTexObjectDestroy",
    "cuSurfObjectCreate",
    "cuSurfObjectDestroy",
    "cuMemcpy3DAsync_v2",
    "cuMemcpy3DPeerAsync",
    "cuStreamBatchMemOp_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuGraphCreate",
    "cuGraphDestroy",
    "cuGraphAddKernelNode_v2",
    "cuGraphAddMemcpyNode",
    "cuGraphAddMemsetNode",
    "cuGraphAddEmptyNode",
    "cuGraphAddDependencies_v2",
    "cuGraphKernelNodeSetAttribute",
    "cuGraphInstantiateWithFlags",
    "cuGraphExecDestroy",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphExecMemcpyNodeSetParams",
    "cuGraphExecMemsetNodeSetParams",
    "cuGraphNodeSetEnabled",
    "cuGraphLaunch",
    "cuGraphUpload",
];

fn main() {
    let table = build_script::driver_table();
    build_script::write("driver.rs", &generate::entry_points(&table, ALSO));
    build_script::write("dispatch.rs", &generate::dispatch(&table));
    println!("cargo::rerun-if-changed=build.rs");
    state();
}

/// Compiles the messages of saved workers with the pure Rust compiler, so that a build needs no `protoc`.
fn state() {
    println!("cargo::rerun-if-changed=proto/state.proto");
    protobuf_codegen::Codegen::new()
        .pure()
        .include("proto")
        .input("proto/state.proto")
        .customize(protobuf_codegen::Customize::default().lite_runtime(true))
        .cargo_out_dir("proto")
        .run_from_script();
}

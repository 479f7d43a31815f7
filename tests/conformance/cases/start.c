// Start-up: what may be called before cuInit and what may not, error names, devices.
#include "case.h"

GROUP(before_start) {
    // Nothing but these works before cuInit.
    int version = 0;
    TRY("before cuInit", cuDriverGetVersion, &version);
    YES(cuDriverGetVersion, "before cuInit, 13.0 or later", version >= 13000);
    const char *text = NULL;
    TRY("before cuInit", cuGetErrorName, CUDA_ERROR_INVALID_VALUE, &text);
    void *found = NULL;
    CUdriverProcAddressQueryResult status = -1;
    TRY("before cuInit", cuGetProcAddress_v2, "cuInit", &found, 13000, 0, &status);
    YES(cuGetProcAddress_v2, "before cuInit, found", found && status == CU_GET_PROC_ADDRESS_SUCCESS);

    int number = 0;
    size_t bytes;
    CUcontext current;
    CUstream stream;
    CUevent event;
    CUdeviceptr memory;
    void *host;
    TRY("before cuInit", cuDeviceGetCount, &number);
    TRY("before cuInit", cuDeviceGet, &number, 0);
    TRY("before cuInit", cuDeviceGetAttribute, &number, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0);
    TRY("before cuInit", cuDeviceTotalMem_v2, &bytes, 0);
    TRY("before cuInit", cuDevicePrimaryCtxRetain, &current, 0);
    TRY("before cuInit", cuCtxCreate_v2, &current, 0, 0);
    TRY("before cuInit", cuCtxGetCurrent, &current);
    TRY("before cuInit", cuCtxSetCurrent, NULL);
    TRY("before cuInit", cuCtxSynchronize, );
    TRY("before cuInit", cuStreamCreate, &stream, 0);
    TRY("before cuInit", cuEventCreate, &event, 0);
    TRY("before cuInit", cuMemAlloc_v2, &memory, 64);
    TRY("before cuInit", cuMemHostAlloc, &host, 64, 0);
    TRY("before cuInit", cuMemFree_v2, 0);
    TRY("before cuInit", cuModuleLoadData, &module, code_ptx);
}

GROUP(initialise) {
    TRY("with a flag", cuInit, 1);
    TRY("first", cuInit, 0);
    TRY("again", cuInit, 0);
    TRY("to null", cuDriverGetVersion, NULL);
}

GROUP(errors_by_name) {
    static const CUresult codes[] = {CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY,
        CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_NO_DEVICE, CUDA_ERROR_INVALID_DEVICE,
        CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_NO_BINARY_FOR_GPU,
        CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, CUDA_ERROR_INVALID_PTX, CUDA_ERROR_INVALID_SOURCE,
        CUDA_ERROR_FILE_NOT_FOUND, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_READY,
        CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, CUDA_ERROR_LAUNCH_TIMEOUT,
        CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED,
        CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_ASSERT,
        CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
        CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, CUDA_ERROR_NOT_SUPPORTED,
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CUDA_ERROR_UNKNOWN};
    char what[64];
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        const char *name = NULL, *text = NULL;
        CUresult named = CU(cuGetErrorName)(codes[i], &name), told = CU(cuGetErrorString)(codes[i], &text);
        snprintf(what, sizeof what, "of %d", codes[i]);
        TELL(cuGetErrorName, what, "%s %s", code_name(named), name ? name : "null");
        TELL(cuGetErrorString, what, "%s %s", code_name(told), text ? text : "null");
    }
    const char *text = "kept";
    TRY("of no code", cuGetErrorName, (CUresult)12345, &text);
    YES(cuGetErrorName, "of no code, gives null", text == NULL);
    text = "kept";
    TRY("of no code", cuGetErrorString, (CUresult)12345, &text);
    YES(cuGetErrorString, "of no code, gives null", text == NULL);
}

GROUP(devices) {
    with_driver();
    int count = 0, value = 0, other = 0;
    TRY("there are some", cuDeviceGetCount, &count);
    YES(cuDeviceGetCount, "at least one", count >= 1);
    TRY("to null", cuDeviceGetCount, NULL);
    CUdevice found = -1;
    TRY("the first", cuDeviceGet, &found, 0);
    TRY("behind the last", cuDeviceGet, &found, count);
    TRY("of a negative number", cuDeviceGet, &found, -1);
    TRY("to null", cuDeviceGet, NULL, 0);

    char name[256] = "", start[5] = "";
    TRY("whole", cuDeviceGetName, name, sizeof name, device);
    YES(cuDeviceGetName, "is not empty", name[0] != 0);
    TRY("into five bytes", cuDeviceGetName, start, 5, device);
    YES(cuDeviceGetName, "into five bytes, the first four", strncmp(start, name, 4) == 0 && start[4] == 0);
    TRY("to null", cuDeviceGetName, NULL, 5, device);
    TRY("of no device", cuDeviceGetName, name, sizeof name, count);

    CUuuid uuid, again;
    TRY("of the first", cuDeviceGetUuid, &uuid, device);
    TRY("of the first", cuDeviceGetUuid_v2, &again, device);
    YES(cuDeviceGetUuid_v2, "as cuDeviceGetUuid", memcmp(&uuid, &again, sizeof uuid) == 0);
    TRY("to null", cuDeviceGetUuid, NULL, device);
    TRY("to null", cuDeviceGetUuid_v2, NULL, device);
    TRY("of no device", cuDeviceGetUuid, &uuid, count);
    TRY("of no device", cuDeviceGetUuid_v2, &uuid, count);

    size_t bytes = 0;
    TRY("of the first", cuDeviceTotalMem_v2, &bytes, device);
    YES(cuDeviceTotalMem_v2, "more than 64 MiB", bytes > 64 << 20);
    TRY("to null", cuDeviceTotalMem_v2, NULL, device);
    TRY("of no device", cuDeviceTotalMem_v2, &bytes, count);

    size_t width = 0;
    TRY("of bytes", cuDeviceGetTexture1DLinearMaxWidth, &width, CU_AD_FORMAT_UNSIGNED_INT8, 1, device);
    TELL(cuDeviceGetTexture1DLinearMaxWidth, "of bytes, is", "%zu", width);
    TRY("of float4", cuDeviceGetTexture1DLinearMaxWidth, &width, CU_AD_FORMAT_FLOAT, 4, device);
    TELL(cuDeviceGetTexture1DLinearMaxWidth, "of float4, is", "%zu", width);
    TRY("of three channels", cuDeviceGetTexture1DLinearMaxWidth, &width, CU_AD_FORMAT_FLOAT, 3, device);
    TRY("of no format", cuDeviceGetTexture1DLinearMaxWidth, &width, (CUarray_format)0, 1, device);
    TRY("to null", cuDeviceGetTexture1DLinearMaxWidth, NULL, CU_AD_FORMAT_FLOAT, 1, device);
    TRY("of no device", cuDeviceGetTexture1DLinearMaxWidth, &width, CU_AD_FORMAT_FLOAT, 1, count);

    CUatomicOperation operations[] = {CU_ATOMIC_OPERATION_INTEGER_ADD, CU_ATOMIC_OPERATION_CAS}, none = 13;
    unsigned capabilities[2] = {9, 9};
    TRY("of two operations", cuDeviceGetHostAtomicCapabilities, capabilities, operations, 2, device);
    TELL(cuDeviceGetHostAtomicCapabilities, "of two operations, are", "%u %u", capabilities[0], capabilities[1]);
    TRY("of no operation", cuDeviceGetHostAtomicCapabilities, capabilities, operations, 0, device);
    TRY("of one that does not exist", cuDeviceGetHostAtomicCapabilities, capabilities, &none, 1, device);
    TRY("of null", cuDeviceGetHostAtomicCapabilities, capabilities, NULL, 2, device);
    TRY("to null", cuDeviceGetHostAtomicCapabilities, NULL, operations, 2, device);
    TRY("of no device", cuDeviceGetHostAtomicCapabilities, capabilities, operations, 2, count);

    TRY("of the first", cuDeviceComputeCapability, &value, &other, device);
    int major = 0, minor = 0;
    SET(cuDeviceGetAttribute, &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
    SET(cuDeviceGetAttribute, &minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
    YES(cuDeviceComputeCapability, "as the attributes", value == major && other == minor);
    TRY("of no device", cuDeviceComputeCapability, &value, &other, count);
    TRY("to null", cuDeviceComputeCapability, NULL, &other, device);

    CUdevprop properties;
    TRY("of the first", cuDeviceGetProperties, &properties, device);
    TELL(cuDeviceGetProperties, "threads in a block", "%d", properties.maxThreadsPerBlock);
    TELL(cuDeviceGetProperties, "threads in a warp", "%d", properties.SIMDWidth);
    TRY("to null", cuDeviceGetProperties, NULL, device);
    TRY("of no device", cuDeviceGetProperties, &properties, count);

    char bus[64] = "", short_bus[4] = "";
    TRY("of the first", cuDeviceGetPCIBusId, bus, sizeof bus, device);
    YES(cuDeviceGetPCIBusId, "has the form 0000:00:00.0", strlen(bus) == 12 && bus[4] == ':' && bus[7] == ':');
    TRY("to null", cuDeviceGetPCIBusId, NULL, 64, device);
    TRY("of no device", cuDeviceGetPCIBusId, bus, sizeof bus, count);
    (void)short_bus;
    found = -1;
    TRY("of the first", cuDeviceGetByPCIBusId, &found, bus);
    TELL(cuDeviceGetByPCIBusId, "of the first, is", "%d", found);
    TRY("of no device", cuDeviceGetByPCIBusId, &found, "ffff:ff:1f.0");
    TRY("of no form", cuDeviceGetByPCIBusId, &found, "nonsense");
    TRY("to null", cuDeviceGetByPCIBusId, NULL, bus);
    TRY("of null", cuDeviceGetByPCIBusId, &found, NULL);
}

GROUP(device_attributes) {
    with_driver();
    int value = 0;
    // What is the same on every GPU that runs CUDA 13.
    static const struct {
        const char *name;
        CUdevice_attribute attribute;
    } same[] = {
        {"threads in a block", CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK},
        {"width of a block", CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X},
        {"height of a block", CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y},
        {"depth of a block", CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z},
        {"width of a grid", CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X},
        {"height of a grid", CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y},
        {"depth of a grid", CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z},
        {"threads in a warp", CU_DEVICE_ATTRIBUTE_WARP_SIZE},
        {"constant memory", CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY},
        {"shared memory in a block", CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK},
        {"registers in a block", CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK},
        {"maps host memory", CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY},
        {"unified addressing", CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING},
        {"concurrent kernels", CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS},
        {"stream priorities", CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED},
        {"cooperative launch", CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH},
        {"texture alignment", CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT},
        {"texture pitch alignment", CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT},
        {"surface alignment", CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT},
        {"compute mode", CU_DEVICE_ATTRIBUTE_COMPUTE_MODE},
        {"overlaps copies", CU_DEVICE_ATTRIBUTE_GPU_OVERLAP},
        {"global L1 cache", CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED},
        {"local L1 cache", CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED},
        {"registers host memory", CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED},
        {"64-bit stream memory operations", CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS},
        {"stream waits for not-or", CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR},
    };
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        CUresult result = CU(cuDeviceGetAttribute)(&value, same[i].attribute, device);
        TELL(cuDeviceGetAttribute, same[i].name, "%s %d", code_name(result), value);
    }
    TRY("that does not exist", cuDeviceGetAttribute, &value, 0x7fff, device);
    TRY("number 0", cuDeviceGetAttribute, &value, 0, device);
    TRY("to null", cuDeviceGetAttribute, NULL, CU_DEVICE_ATTRIBUTE_WARP_SIZE, device);
    TRY("of no device", cuDeviceGetAttribute, &value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 999);
}

GROUP(profiler) {
    with_driver();
    TRY("without a context", cuProfilerStart, );
    TRY("without a context", cuProfilerStop, );
    SET(cuCtxCreate_v2, &context, 0, device);
    TRY("in a context", cuProfilerStart, );
    TRY("in a context", cuProfilerStop, );
    TRY("in a context, again", cuProfilerStop, );
    // Deprecated in 11.0, and since then without a purpose.
    TRY("of a file", cuProfilerInitialize, "/dev/null", "/dev/null", 0);
}

// Errors that end a context: what every call says from then on.
#include "case.h"

static void after_it(void) {
    CUdeviceptr memory;
    CUstream stream;
    CUevent event;
    CUfunction found;
    CUmodule loaded;
    CUcontext current = NULL;
    void *host;
    char bytes[64];
    int value;
    size_t free, total;
    TRY("after it", cuCtxSynchronize, );
    TRY("after it, again", cuCtxSynchronize, );
    TRY("after it", cuStreamSynchronize, NULL);
    TRY("after it", cuStreamQuery, NULL);
    TRY("after it", cuMemAlloc_v2, &memory, 64);
    TRY("after it", cuMemFree_v2, 0);
    TRY("after it", cuMemGetInfo_v2, &free, &total);
    TRY("after it", cuMemHostAlloc, &host, 64, 0);
    TRY("after it", cuMemsetD8_v2, 0, 0, 0);
    TRY("after it", cuStreamCreate, &stream, 0);
    TRY("after it", cuEventCreate, &event, 0);
    TRY("after it", cuModuleGetFunction, &found, module, "add");
    TRY("after it", cuModuleLoadData, &loaded, code_ptx);
    TRY("after it", cuMemcpyDtoH_v2, bytes, 0, 64);
    // What asks nothing of the context still works.
    TRY("after it", cuCtxGetCurrent, &current);
    YES(cuCtxGetCurrent, "after it, is the same", current == context);
    TRY("after it", cuDeviceGetAttribute, &value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, device);
    TRY("after it", cuCtxDestroy_v2, context);
}

GROUP(illegal_address) {
    with_module();
    CUdeviceptr nowhere = 0;
    void *parameters[] = {&nowhere};
    TRY("that stores nowhere", cuLaunchKernel, function("store_to"), 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL);
    TRY("behind it", cuStreamSynchronize, NULL);
    after_it();
}

GROUP(trap) {
    with_module();
    CUstream stream;
    SET(cuStreamCreate, &stream, 0);
    TRY("that stops", cuLaunchKernel, function("stop"), 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
    TRY("behind it", cuStreamSynchronize, stream);
    after_it();
}

GROUP(misaligned) {
    with_module();
    CUdeviceptr memory = device_bytes(64) + 1;
    void *parameters[] = {&memory};
    TRY("that stores at an odd address", cuLaunchKernel, function("store_to"), 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL);
    TRY("behind it", cuCtxSynchronize, );
    TRY("behind it", cuMemAlloc_v2, &memory, 64);
}

GROUP(event_behind) {
    with_module();
    CUevent event;
    SET(cuEventCreate, &event, 0);
    SET(cuLaunchKernel, function("stop"), 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    CU(cuEventRecord)(event, NULL);
    TRY("behind a kernel that stops", cuEventSynchronize, event);
    TRY("behind a kernel that stops", cuEventQuery, event);
}

GROUP(at_once) {
    // What is wrong with one call leaves the context as it was.
    with_module();
    CUdeviceptr memory;
    TRY("that is too large", cuLaunchKernel, function("nothing"), 1, 1, 1, 2000, 1, 1, 0, NULL, NULL, NULL);
    TRY("more than there can be", cuMemAlloc_v2, &memory, (size_t)1 << 46);
    TRY("after errors that end nothing", cuCtxSynchronize, );
    TRY("after errors that end nothing", cuMemAlloc_v2, &memory, 64);
    TRY("after errors that end nothing", cuLaunchKernel, function("nothing"), 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    TRY("at the end", cuCtxSynchronize, );
}

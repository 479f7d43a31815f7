// Launches of every form, and what is wrong with them.
#include "case.h"

static CUdeviceptr sum;

static void with_sum(void) {
    with_module();
    SET(cuMemAlloc_v2, &sum, 4096);
    SET(cuMemsetD8_v2, sum, 0, 4096);
}

// What has been added since the last time.
static int added(void) {
    int value = word_at(sum);
    SET(cuMemsetD8_v2, sum, 0, 4);
    return value;
}

GROUP(parameters) {
    with_sum();
    CUfunction add = function("add");
    CUstream stream;
    SET(cuStreamCreate, &stream, 0);
    int value = 3;
    void *parameters[] = {&sum, &value};
    TRY("by pointers", cuLaunchKernel, add, 2, 1, 1, 4, 1, 1, 0, stream, parameters, NULL);
    TELL(cuLaunchKernel, "by pointers, adds", "%d", added());
    TRY("by pointers", cuLaunchKernel_ptsz, add, 2, 1, 1, 4, 1, 1, 0, NULL, parameters, NULL);
    TELL(cuLaunchKernel_ptsz, "by pointers, adds", "%d", added());
    struct {
        CUdeviceptr sum;
        int value;
    } buffer = {sum, 5};
    size_t size = sizeof buffer.sum + sizeof buffer.value;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &buffer, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
    TRY("by a buffer", cuLaunchKernel, add, 2, 1, 1, 4, 1, 1, 0, NULL, NULL, extra);
    TELL(cuLaunchKernel, "by a buffer, adds", "%d", added());
    TRY("by both", cuLaunchKernel, add, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, extra);
    TRY("by neither", cuLaunchKernel, add, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    char a = 1;
    double b = 20.0;
    short d = 300;
    int c = 4000;
    CUdeviceptr in = sum + 64;
    SET(cuMemcpyHtoD_v2, in, &c, sizeof c);
    void *mixed[] = {&a, &b, &in, &d, &sum};
    TRY("with gaps between them", cuLaunchKernel, function("mixed"), 1, 1, 1, 1, 1, 1, 0, NULL, mixed, NULL);
    TELL(cuLaunchKernel, "with gaps between them, stores", "%d", added());
    TRY("none", cuLaunchKernel, function("nothing"), 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
}

GROUP(shapes) {
    with_sum();
    void *parameters[] = {&sum};
    int seen[6] = {0};
    TRY("2 by 3 by 4 of 5 by 6 by 7", cuLaunchKernel, function("dimensions"), 2, 3, 4, 5, 6, 7, 0, NULL, parameters, NULL);
    SET(cuMemcpyDtoH_v2, seen, sum, sizeof seen);
    TELL(cuLaunchKernel, "2 by 3 by 4 of 5 by 6 by 7, is", "%d %d %d, %d %d %d", seen[0], seen[1], seen[2], seen[3], seen[4],
        seen[5]);
    CUfunction nothing = function("nothing"), shared = function("with_shared"), bounded = function("bounded");
    TRY("without blocks", cuLaunchKernel, nothing, 0, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    TRY("without threads", cuLaunchKernel, nothing, 1, 1, 1, 0, 1, 1, 0, NULL, NULL, NULL);
    TRY("of too many threads", cuLaunchKernel, nothing, 1, 1, 1, 1025, 1, 1, 0, NULL, NULL, NULL);
    TRY("of too deep blocks", cuLaunchKernel, nothing, 1, 1, 1, 1, 1, 65, 0, NULL, NULL, NULL);
    TRY("of too high grids", cuLaunchKernel, nothing, 1, 65536, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    TRY("of too wide grids", cuLaunchKernel, nothing, 0x80000000u, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    TRY("of more threads than its bound", cuLaunchKernel, bounded, 1, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL);
    TRY("of 1024 bytes of shared memory", cuLaunchKernel, shared, 1, 1, 1, 64, 1, 1, 1024, NULL, parameters, NULL);
    TELL(cuLaunchKernel, "of 1024 bytes of shared memory, stores", "%d", added());
    TRY("of more shared memory than allowed", cuLaunchKernel, shared, 1, 1, 1, 64, 1, 1, 60000, NULL, parameters, NULL);
    SET(cuFuncSetAttribute, shared, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 60000);
    TRY("of as much shared memory as was asked for", cuLaunchKernel, shared, 1, 1, 1, 64, 1, 1, 60000, NULL, parameters,
        NULL);
    TRY("after all of them", cuCtxSynchronize, );
    TRY("of null", cuLaunchKernel, NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    TRY("of null", cuLaunchKernel_ptsz, NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    no_context();
    TRY("without a context", cuLaunchKernel, nothing, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
}

GROUP(globals) {
    with_sum();
    void *parameters[] = {&sum};
    int seen[3] = {0}, changed = 7;
    TRY("that reads variables", cuLaunchKernel, function("read_globals"), 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL);
    SET(cuMemcpyDtoH_v2, seen, sum, sizeof seen);
    TELL(cuLaunchKernel, "that reads variables, finds", "%d %d %d", seen[0], seen[1], seen[2]);
    CUdeviceptr number;
    SET(cuModuleGetGlobal_v2, &number, NULL, module, "number");
    SET(cuMemcpyHtoD_v2, number, &changed, sizeof changed);
    SET(cuLaunchKernel, function("read_globals"), 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL);
    TELL(cuLaunchKernel, "that reads a variable that was changed, finds", "%d", word_at(sum));
}

GROUP(configured) {
    with_sum();
    CUfunction add = function("add");
    int value = 3;
    void *parameters[] = {&sum, &value};
    CUlaunchConfig config = {.gridDimX = 2, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 4, .blockDimY = 1, .blockDimZ = 1};
    TRY("without attributes", cuLaunchKernelEx, &config, add, parameters, NULL);
    TELL(cuLaunchKernelEx, "without attributes, adds", "%d", added());
    TRY("without attributes", cuLaunchKernelEx_ptsz, &config, add, parameters, NULL);
    TELL(cuLaunchKernelEx_ptsz, "without attributes, adds", "%d", added());
    CUlaunchAttribute attribute[1] = {{.id = CU_LAUNCH_ATTRIBUTE_PRIORITY}};
    config.attrs = attribute;
    config.numAttrs = 1;
    TRY("of a priority", cuLaunchKernelEx, &config, add, parameters, NULL);
    attribute[0].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attribute[0].value.cooperative = 1;
    TRY("cooperative", cuLaunchKernelEx, &config, add, parameters, NULL);
    attribute[0].id = CU_LAUNCH_ATTRIBUTE_IGNORE;
    TRY("of an attribute to ignore", cuLaunchKernelEx, &config, add, parameters, NULL);
    SET(cuCtxSynchronize, );
    added();
    config.blockDimX = 1025;
    TRY("of too many threads", cuLaunchKernelEx, &config, add, parameters, NULL);
    TRY("of too many threads", cuLaunchKernelEx_ptsz, &config, add, parameters, NULL);
    config.blockDimX = 4;
    config.attrs = NULL;
    TRY("of null attributes", cuLaunchKernelEx, &config, add, parameters, NULL);
    config.numAttrs = 0;
    TRY("of null", cuLaunchKernelEx, &config, NULL, parameters, NULL);
    TRY("with a null configuration", cuLaunchKernelEx, NULL, add, parameters, NULL);
}

GROUP(cooperative) {
    with_sum();
    CUfunction add = function("add");
    int value = 3;
    void *parameters[] = {&sum, &value};
    TRY("that fits", cuLaunchCooperativeKernel, add, 2, 1, 1, 4, 1, 1, 0, NULL, parameters);
    TELL(cuLaunchCooperativeKernel, "that fits, adds", "%d", added());
    TRY("that fits", cuLaunchCooperativeKernel_ptsz, add, 2, 1, 1, 4, 1, 1, 0, NULL, parameters);
    TELL(cuLaunchCooperativeKernel_ptsz, "that fits, adds", "%d", added());
    TRY("of more blocks than fit", cuLaunchCooperativeKernel, add, 1000000, 1, 1, 1024, 1, 1, 0, NULL, parameters);
    TRY("of more blocks than fit", cuLaunchCooperativeKernel_ptsz, add, 1000000, 1, 1, 1024, 1, 1, 0, NULL, parameters);
    TRY("of too many threads", cuLaunchCooperativeKernel, add, 1, 1, 1, 1025, 1, 1, 0, NULL, parameters);
    TRY("of null", cuLaunchCooperativeKernel, NULL, 1, 1, 1, 1, 1, 1, 0, NULL, parameters);
}

GROUP(kernels) {
    // A library's kernel is launched as a function is.
    with_sum();
    CUlibrary library;
    CUkernel kernel;
    SET(cuLibraryLoadData, &library, code_ptx, NULL, NULL, 0, NULL, NULL, 0);
    SET(cuLibraryGetKernel, &kernel, library, "add");
    int value = 3;
    void *parameters[] = {&sum, &value};
    TRY("a kernel", cuLaunchKernel, (CUfunction)kernel, 1, 1, 1, 4, 1, 1, 0, NULL, parameters, NULL);
    TELL(cuLaunchKernel, "a kernel, adds", "%d", added());
}

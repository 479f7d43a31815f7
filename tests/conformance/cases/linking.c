// The linker, launches by the calls from before CUDA 4, cooperative launches on several devices, occupancy by
// configuration, users of a context.
#include "case.h"

static const char user_text[] = ".version 7.0\n.target sm_75\n.address_size 64\n"
                                ".extern .func (.param .b32 r) three();\n"
                                ".visible .entry linked(.param .u64 to)\n{\n.reg .b32 %r<2>;\n.reg .b64 %rd<3>;\n"
                                ".param .b32 answer;\ncall.uni (answer), three, ();\nld.param.b32 %r1, [answer];\n"
                                "ld.param.u64 %rd1, [to];\ncvta.to.global.u64 %rd2, %rd1;\nst.global.u32 [%rd2], %r1;\nret;\n}\n";
static const char other_text[] = ".version 7.0\n.target sm_75\n.address_size 64\n"
                                 ".visible .func (.param .b32 r) three()\n{\n.reg .b32 %r<2>;\nmov.u32 %r1, 3;\n"
                                 "st.param.b32 [r], %r1;\nret;\n}\n";
static const char wrong_text[] = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry e() { no.such";

GROUP(linker) {
    with_context();
    CUlinkState state, other;
    TRY("no options", cuLinkCreate_v2, 0, NULL, NULL, &state);
    TRY("no options", cuLinkCreate, 0, NULL, NULL, &other);
    TRY("options without numbers", cuLinkCreate_v2, 1, NULL, NULL, &state);
    TRY("options without numbers", cuLinkCreate, 1, NULL, NULL, &state);
    TRY("PTX", cuLinkAddData_v2, state, CU_JIT_INPUT_PTX, (void *)user_text, sizeof user_text, "user", 0, NULL, NULL);
    TRY("PTX", cuLinkAddData, other, CU_JIT_INPUT_PTX, (void *)user_text, sizeof user_text, "user", 0, NULL, NULL);
    TRY("no data", cuLinkAddData_v2, state, CU_JIT_INPUT_PTX, NULL, 0, "user", 0, NULL, NULL);
    TRY("no data", cuLinkAddData, state, CU_JIT_INPUT_PTX, NULL, 0, "user", 0, NULL, NULL);
    TRY("no such file", cuLinkAddFile_v2, state, CU_JIT_INPUT_PTX, "/nowhere.ptx", 0, NULL, NULL);
    TRY("no such file", cuLinkAddFile, state, CU_JIT_INPUT_PTX, "/nowhere.ptx", 0, NULL, NULL);
    char name[] = "/tmp/conformance-XXXXXX";
    int file = mkstemp(name);
    if (file < 0 || write(file, other_text, sizeof other_text - 1) < 0) {
        exit(3);
    }
    close(file);
    TRY("PTX", cuLinkAddFile_v2, state, CU_JIT_INPUT_PTX, name, 0, NULL, NULL);
    TRY("PTX", cuLinkAddFile, other, CU_JIT_INPUT_PTX, name, 0, NULL, NULL);
    unlink(name);
    void *cubin;
    size_t size;
    TRY("of two texts", cuLinkComplete, state, &cubin, &size);
    CUmodule linked;
    CUfunction f;
    SET(cuModuleLoadData, &linked, cubin);
    SET(cuModuleGetFunction, &f, linked, "linked");
    CUdeviceptr to = device_bytes(4);
    void *parameters[] = {&to};
    SET(cuLaunchKernel, f, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL);
    TELL(cuLinkComplete, "of two texts, calls from one to the other", "%d", word_at(to));
    TRY("of one that is complete", cuLinkDestroy, state);
    TRY("of one that is not", cuLinkDestroy, other);
    char said[512] = "";
    CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *values[] = {said, (void *)sizeof said};
    SET(cuLinkCreate_v2, 2, options, values, &state);
    TRY("PTX that does not parse", cuLinkAddData_v2, state, CU_JIT_INPUT_PTX, (void *)wrong_text, sizeof wrong_text, "wrong", 0,
        NULL, NULL);
    YES(cuLinkAddData_v2, "PTX that does not parse, is said", said[0] != 0);
    SET(cuLinkDestroy, state);
    SET(cuLinkCreate_v2, 0, NULL, NULL, &state);
    SET(cuLinkAddData_v2, state, CU_JIT_INPUT_PTX, (void *)other_text, sizeof other_text, "other", 0, NULL, NULL);
    TRY("into nothing", cuLinkComplete, state, NULL, NULL);
    SET(cuLinkDestroy, state);
}

GROUP(before_cuda_4) {
    with_module();
    CUdeviceptr sum;
    SET(cuMemAlloc_v2, &sum, 4096);
    SET(cuMemsetD8_v2, sum, 0, 4096);
    SET(cuCtxSynchronize);
    CUfunction add = function("add");
    TRY("of no blocks", cuLaunchGrid, add, 0, 1);
    TRY("of no blocks", cuLaunchGridAsync, add, 0, 1, NULL);
    TRY("4 by 1 by 1", cuFuncSetBlockShape, add, 4, 1, 1);
    TRY("0 by 1 by 1", cuFuncSetBlockShape, add, 0, 1, 1);
    TRY("64 bytes", cuFuncSetSharedSize, add, 64);
    TRY("of a pointer and a number", cuParamSetSize, add, 12);
    TRY("too large", cuParamSetSize, add, 1 << 20);
    TRY("a pointer", cuParamSetv, add, 0, &sum, 8);
    TRY("from null", cuParamSetv, add, 0, NULL, 8);
    TRY("a number", cuParamSeti, add, 8, 3);
    TRY("a number beyond those there are", cuParamSetf, add, 12, 1.0f);
    TRY("one block", cuLaunch, add);
    TRY("2 by 2", cuLaunchGrid, add, 2, 2);
    TRY("1 by 1", cuLaunchGridAsync, add, 1, 1, NULL);
    TELL(cuLaunch, "6 blocks of 4 threads, each 3", "%d", word_at(sum));
    no_context();
    TRY("without a context", cuLaunch, add);
}

GROUP(before_and_after_cuda_4) {
    // A launch by one of the newer calls overwrites what the older ones have set.
    with_module();
    CUdeviceptr sum, other;
    SET(cuMemAlloc_v2, &sum, 4096);
    SET(cuMemAlloc_v2, &other, 4096);
    SET(cuMemsetD8_v2, sum, 0, 4096);
    SET(cuMemsetD8_v2, other, 0, 4096);
    SET(cuCtxSynchronize);
    CUfunction add = function("add");
    SET(cuFuncSetBlockShape, add, 4, 1, 1);
    SET(cuFuncSetSharedSize, add, 64);
    SET(cuParamSetSize, add, 12);
    SET(cuParamSetv, add, 0, &sum, 8);
    SET(cuParamSeti, add, 8, 3);
    int five = 5;
    void *parameters[] = {&other, &five};
    TRY("2 threads, each 5", cuLaunchKernel, add, 1, 1, 1, 2, 1, 1, 0, NULL, parameters, NULL);
    TRY("as cuLaunchKernel left it", cuLaunch, add);
    TELL(cuLaunch, "as cuLaunchKernel left it, where it was set", "%d", word_at(sum));
    TELL(cuLaunch, "as cuLaunchKernel left it, there", "%d", word_at(other));
    SET(cuFuncSetBlockShape, add, 8, 1, 1);
    TRY("of 8 threads", cuLaunch, add);
    TELL(cuLaunch, "of 8 threads, each 5", "%d", word_at(other));
    five = 7;
    TRY("3 threads, each 7", cuLaunchCooperativeKernel, add, 1, 1, 1, 3, 1, 1, 0, NULL, parameters);
    TRY("as cuLaunchCooperativeKernel left it", cuLaunch, add);
    TELL(cuLaunch, "as cuLaunchCooperativeKernel left it, there", "%d", word_at(other));
    SET(cuParamSeti, add, 8, 1);
    TRY("each 1", cuLaunch, add);
    TELL(cuLaunch, "3 threads, each 1", "%d", word_at(other));
}

GROUP(several_devices) {
    with_module();
    CUstream stream;
    SET(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    CUDA_LAUNCH_PARAMS one;
    memset(&one, 0, sizeof one);
    one.function = function("nothing");
    one.gridDimX = one.gridDimY = one.gridDimZ = one.blockDimX = one.blockDimY = one.blockDimZ = 1;
    one.hStream = stream;
    TRY("on one device", cuLaunchCooperativeKernelMultiDevice, &one, 1, 0);
    TRY("on none", cuLaunchCooperativeKernelMultiDevice, &one, 0, 0);
    SET(cuStreamSynchronize, stream);
}

static size_t shared_of(int threads) { return (size_t)threads * 8; }

GROUP(configurations) {
    with_module();
    CUfunction nothing = function("nothing");
    int grid = 0, block = 0, number = 0;
    TRY("any", cuOccupancyMaxPotentialBlockSize, &grid, &block, nothing, NULL, 0, 0);
    YES(cuOccupancyMaxPotentialBlockSize, "any, is some", grid > 0 && block > 0 && block % 32 == 0);
    TRY("by a function", cuOccupancyMaxPotentialBlockSizeWithFlags, &grid, &block, nothing, shared_of, 0, 128, 0);
    YES(cuOccupancyMaxPotentialBlockSizeWithFlags, "by a function, is some", grid > 0 && block > 0 && block <= 128);
    TRY("into null", cuOccupancyMaxPotentialBlockSize, NULL, NULL, nothing, NULL, 0, 0);
    TRY("into null", cuOccupancyMaxPotentialBlockSizeWithFlags, NULL, NULL, nothing, NULL, 0, 0, 0);
    CUlaunchConfig config;
    memset(&config, 0, sizeof config);
    config.gridDimX = 8;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.blockDimX = 64;
    TRY("of 64 threads", cuOccupancyMaxPotentialClusterSize, &number, nothing, &config);
    TRY("without a configuration", cuOccupancyMaxPotentialClusterSize, &number, nothing, NULL);
    CUlaunchAttribute cluster;
    memset(&cluster, 0, sizeof cluster);
    cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim.x = 2;
    cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1;
    config.attrs = &cluster;
    config.numAttrs = 1;
    TRY("of 2 blocks", cuOccupancyMaxActiveClusters, &number, nothing, &config);
    YES(cuOccupancyMaxActiveClusters, "of 2 blocks, is some", number > 0);
    TRY("without a configuration", cuOccupancyMaxActiveClusters, &number, nothing, NULL);
}

GROUP(users) {
    with_driver();
    CUcontext made, again;
    int supported = -1;
    TRY("of multiprocessors", cuDeviceGetExecAffinitySupport, &supported, CU_EXEC_AFFINITY_TYPE_SM_COUNT, 0);
    TRY("of what there is not", cuDeviceGetExecAffinitySupport, &supported, (CUexecAffinityType)99, 0);
    TRY("on none", cuDeviceGetExecAffinitySupport, &supported, CU_EXEC_AFFINITY_TYPE_SM_COUNT, -1);
    CUexecAffinityParam affinity;
    TRY("without a context", cuCtxGetExecAffinity, &affinity, CU_EXEC_AFFINITY_TYPE_SM_COUNT);
    TRY("without a context", cuCtxAttach, &again, 0);
    TRY("on the first device", cuCtxCreate, &made, 0, 0);
    TRY("on none", cuCtxCreate, &again, 0, -1);
    TRY("of multiprocessors", cuCtxGetExecAffinity, &affinity, CU_EXEC_AFFINITY_TYPE_SM_COUNT);
    TRY("the current one", cuCtxAttach, &again, 0);
    YES(cuCtxAttach, "the current one, is it", again == made);
    TRY("with flags", cuCtxAttach, &again, 1);
    TRY("of two users", cuCtxDetach, made);
    SET(cuCtxSynchronize);
    TRY("of the last", cuCtxDetach, made);
    no_context();
    TRY("without a context", cuCtxDetach, made);
}

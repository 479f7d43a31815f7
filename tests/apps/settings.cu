// Attributes of functions and kernels that are set while launches wait behind a host callback, which waits for the thread
// that sets them. A launch has the attributes that were set when it was made.
//
//   settings [--rounds N] [--strict N] [--sleep-us N] [--progress FILE]      40, 0, 0, none
//
// Prints "attributes ok" and "digest D", the same in every run with the same numbers. FILE holds the rounds done. With
// --strict a callback waits as long as it takes; without it a second at most.
#include "driver.h"

static bool strict;

// Folds its shared memory, which it has filled, into a word: as much as it was launched with.
static const char *text = R"(
.version 7.0
.target sm_75
.address_size 64
.extern .shared .align 4 .b8 buffer[];
.visible .entry fill(.param .u64 result, .param .u32 words, .param .u32 number) {
    .reg .u64 %out, %at;
    .reg .u32 %n, %i, %x, %y, %offset, %base;
    .reg .pred %p;
    ld.param.u64 %out, [result];
    ld.param.u32 %n, [words];
    ld.param.u32 %x, [number];
    cvta.to.global.u64 %out, %out;
    mov.u32 %base, buffer;
    mov.u32 %i, 0;
store:
    setp.ge.u32 %p, %i, %n;
    @%p bra fold;
    mad.lo.u32 %x, %x, 747796405, %i;
    mad.lo.u32 %offset, %i, 4, %base;
    st.shared.u32 [%offset], %x;
    add.u32 %i, %i, 509;
    bra store;
fold:
    ld.global.u32 %y, [%out];
    mov.u32 %i, 0;
more:
    setp.ge.u32 %p, %i, %n;
    @%p bra done;
    mad.lo.u32 %offset, %i, 4, %base;
    ld.shared.u32 %x, [%offset];
    mad.lo.u32 %y, %y, 69069, %x;
    add.u32 %i, %i, 509;
    bra more;
done:
    st.global.u32 [%out], %y;
    ret;
}
)";

static void CUDA_CB gate(void *argument) {
    for (int i = 0; (strict || i < 2000) && !__atomic_load_n((int *)argument, __ATOMIC_SEQ_CST); i++) {
        sleep_us(500);
    }
}

static void launch(CUfunction function, CUdeviceptr result, uint32_t bytes, uint32_t number, CUstream stream) {
    uint32_t words = bytes / 4;
    void *parameters[] = {&result, &words, &number};
    CU(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, bytes, stream, parameters, nullptr);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t rounds = options.number("--rounds", 40), pause_us = options.number("--sleep-us", 0);
    strict = options.number("--strict", 0) != 0;
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    const CUfunction_attribute limit = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    CUdevice device;
    CUcontext context;
    CU(cuInit, 0);
    CU(cuDeviceGet, &device, 0);
    CU(cuDevicePrimaryCtxRetain, &context, device);
    CU(cuCtxSetCurrent, context);
    CUmodule module;
    CUlibrary library;
    CUfunction function, late;
    CUkernel kernel;
    CU(cuModuleLoadData, &module, text);
    CU(cuModuleGetFunction, &function, module, "fill");
    CU(cuLibraryLoadData, &library, text, nullptr, nullptr, 0, nullptr, nullptr, 0);
    CU(cuLibraryGetKernel, &kernel, library, "fill");
    CUstream streams[2];
    CUdeviceptr results;
    CU(cuStreamCreate, &streams[0], CU_STREAM_NON_BLOCKING);
    CU(cuStreamCreate, &streams[1], CU_STREAM_NON_BLOCKING);
    CU(cuMemAlloc, &results, 64);
    CU(cuMemsetD32, results, 7, 16);
    CU(cuCtxSynchronize);
    // A kernel is loaded when it is first launched.
    launch(function, results, 1024, 0, streams[0]);
    launch((CUfunction)kernel, results + 4, 1024, 0, streams[0]);
    CU(cuCtxSynchronize);

    for (uint64_t round = 1; round <= rounds; round++) {
        const uint32_t number = (uint32_t)round * 16, large = 56 << 10, small = 12 << 10;
        int open = 0, value;
        // The first launch has more than is allowed when it runs, and so does one that follows it in another stream.
        CU(cuFuncSetAttribute, function, limit, large);
        CU(cuKernelSetAttribute, limit, large, kernel, device);
        CU(cuLaunchHostFunc, streams[0], gate, &open);
        CUevent behind;
        CU(cuEventCreate, &behind, CU_EVENT_DISABLE_TIMING);
        CU(cuEventRecord, behind, streams[0]);
        CU(cuStreamWaitEvent, streams[1], behind, 0);
        launch(function, results, large, number, streams[0]);
        launch((CUfunction)kernel, results + 4, large, number + 1, streams[1]);
        CU(cuFuncSetAttribute, function, limit, small);
        CU(cuKernelSetAttribute, limit, small, kernel, device);
        launch(function, results, small, number + 2, streams[0]);
        launch((CUfunction)kernel, results + 4, small, number + 3, streams[1]);
        CU(cuFuncGetAttribute, &value, limit, function);
        REQUIRE(value == (int)small);
        // Hints, and what loads a function.
        CU(cuFuncSetCacheConfig, function, round % 2 ? CU_FUNC_CACHE_PREFER_L1 : CU_FUNC_CACHE_PREFER_SHARED);
        CU(cuKernelSetCacheConfig, kernel, CU_FUNC_CACHE_PREFER_L1, device);
        CU(cuModuleGetFunction, &late, module, "fill");
        CU(cuFuncLoad, late);
        // Once more, to where it was.
        CU(cuFuncSetAttribute, function, limit, large + 1024);
        launch(function, results, large + 1024, number + 4, streams[0]);
        CU(cuFuncSetAttribute, function, limit, small);
        progress(progress_file, round);
        __atomic_store_n(&open, 1, __ATOMIC_SEQ_CST);
        CU(cuStreamSynchronize, streams[0]);
        CU(cuStreamSynchronize, streams[1]);
        CU(cuEventDestroy, behind);
        CU(cuFuncGetAttribute, &value, limit, function);
        REQUIRE(value == (int)small);
        FAILS(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, large, streams[0], nullptr, nullptr);
        sleep_us(pause_us);
    }
    uint32_t out[16];
    CU(cuCtxSynchronize);
    CU(cuMemcpyDtoH, out, results, sizeof out);
    printf("attributes ok\ndigest %016llx\n", (unsigned long long)digest(out, sizeof out));
    return 0;
}

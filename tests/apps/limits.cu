// What is set once and asked for ever after: limits, cache and shared memory preferences and flags of contexts,
// attributes of functions and kernels, users of a context. All of it is asked again in each iteration, and a kernel
// that needs more shared memory than without asking is launched.
//
//   limits [--iterations N] [--sleep-us N] [--progress FILE]      50, 0, none
//
// Prints "sum S", the same in every run with the same numbers. FILE holds the iterations done.
#include "driver.h"

extern "C" __global__ void large(unsigned *out, unsigned turn, unsigned words) {
    extern __shared__ unsigned room[];
    for (unsigned i = threadIdx.x; i < words; i += blockDim.x) {
        room[i] = i * turn;
    }
    __syncthreads();
    unsigned sum = 0;
    for (unsigned i = threadIdx.x; i < words; i += blockDim.x) {
        sum += room[words - 1 - i];
    }
    atomicAdd(out, sum);
}

static const char MODULE[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry one(.param .u64 data, .param .u32 count)
{
    ret;
}
.visible .entry two(.param .u8 small, .param .align 8 .b8 large[24], .param .u64 last)
{
    ret;
}
)";

static const unsigned WORDS = (64 << 10) / 4;

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 50);
    const uint64_t sleep = options.number("--sleep-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    unsigned *sum;
    CHECK(cudaMalloc(&sum, 4));
    CHECK(cudaMemset(sum, 0, 4));
    CHECK(cudaFuncSetAttribute(large, cudaFuncAttributeMaxDynamicSharedMemorySize, WORDS * 4));
    CHECK(cudaFuncSetAttribute(large, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
    CHECK(cudaFuncSetCacheConfig(large, cudaFuncCachePreferShared));
    CHECK(cudaDeviceSetLimit(cudaLimitStackSize, 4096));
    CHECK(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 16 << 20));

    CUcontext first, made, again;
    CUdevice device;
    CU(cuCtxGetCurrent, &first);
    CU(cuCtxGetDevice, &device);
    CU(cuCtxCreate, &made, nullptr, CU_CTX_SCHED_YIELD, device);
    CU(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, 8192);
    CU(cuCtxSetCacheConfig, CU_FUNC_CACHE_PREFER_L1);
    CU(cuCtxAttach, &again, 0);
    REQUIRE(again == made);
    CUmodule module;
    CUfunction one, two;
    CU(cuModuleLoadData, &module, MODULE);
    CU(cuModuleGetFunction, &one, module, "one");
    CU(cuModuleGetFunction, &two, module, "two");
    CU(cuFuncSetAttribute, one, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 96 << 10);
    CU(cuFuncSetAttribute, two, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 50);
    CU(cuFuncSetCacheConfig, two, CU_FUNC_CACHE_PREFER_EQUAL);
    CUcontext popped;
    CU(cuCtxPopCurrent, &popped);
    REQUIRE(popped == made);

    for (uint64_t i = 0; i < iterations; i++) {
        large<<<2, 128, WORDS * 4>>>(sum, (unsigned)i, WORDS);
        CHECK(cudaGetLastError());
        cudaFuncAttributes known;
        CHECK(cudaFuncGetAttributes(&known, large));
        REQUIRE(known.maxDynamicSharedSizeBytes == (int)WORDS * 4 && known.preferredShmemCarveout == 100);
        size_t limit;
        CHECK(cudaDeviceGetLimit(&limit, cudaLimitStackSize));
        REQUIRE(limit == 4096);
        CHECK(cudaDeviceGetLimit(&limit, cudaLimitMallocHeapSize));
        REQUIRE(limit >= 16 << 20);

        CU(cuCtxPushCurrent, made);
        CU(cuCtxGetLimit, &limit, CU_LIMIT_STACK_SIZE);
        REQUIRE(limit == 8192);
        // Another value each time: a log of all of them would grow for ever.
        CU(cuCtxSetLimit, CU_LIMIT_PRINTF_FIFO_SIZE, (size_t)((1 + i % 3) << 20));
        CU(cuCtxGetLimit, &limit, CU_LIMIT_PRINTF_FIFO_SIZE);
        REQUIRE(limit == (1 + i % 3) << 20);
        FAILS(CUDA_ERROR_INVALID_VALUE, cuCtxGetLimit, &limit, (CUlimit)1000);
        CUfunc_cache cache;
        CU(cuCtxGetCacheConfig, &cache);
        REQUIRE(cache == CU_FUNC_CACHE_PREFER_L1);
        unsigned flags, version;
        CU(cuCtxGetFlags, &flags);
        REQUIRE((flags & CU_CTX_SCHED_MASK) == CU_CTX_SCHED_YIELD);
        CU(cuCtxGetApiVersion, made, &version);
        int least, greatest, value;
        CU(cuCtxGetStreamPriorityRange, &least, &greatest);
        REQUIRE(least == 0 && greatest < 0);
        CU(cuFuncGetAttribute, &value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, one);
        REQUIRE(value == 96 << 10);
        CU(cuFuncGetAttribute, &value, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, two);
        REQUIRE(value == 50);
        FAILS(CUDA_ERROR_INVALID_VALUE, cuFuncSetAttribute, one, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1 << 30);
        FAILS(CUDA_ERROR_INVALID_VALUE, cuFuncGetAttribute, &value, (CUfunction_attribute)1000, one);
        size_t offset, size;
        CU(cuFuncGetParamInfo, two, 2, &offset, &size);
        REQUIRE(offset == 32 && size == 8);
        FAILS(CUDA_ERROR_INVALID_VALUE, cuFuncGetParamInfo, two, 3, &offset, &size);
        CU(cuCtxPopCurrent, &popped);
        REQUIRE(popped == made);
        CHECK(cudaDeviceSynchronize());
        progress(file, i + 1);
        sleep_us(sleep);
    }

    // The first takes away a user, the second the context.
    CU(cuCtxPushCurrent, made);
    CU(cuCtxDetach, made);
    CU(cuCtxSynchronize);
    CU(cuCtxDetach, made);
    unsigned said;
    CHECK(cudaMemcpy(&said, sum, 4, cudaMemcpyDeviceToHost));
    printf("sum %u\n", said);
    return 0;
}

// Streams that wait for words of memory: which other streams write, on the device and in pinned memory, and the CPU.
//
//   waitvalue [--rounds N] [--words N] [--sleep-us N] [--progress FILE]      60, 4096, 0, none
//
// Prints "attributes ok" and "digest D", the same in every run with the same numbers. FILE holds the rounds done.
#include "app.h"

#include <cuda.h>

typedef CUresult (*PFN_write32)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
typedef CUresult (*PFN_wait32)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
typedef CUresult (*PFN_write64)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);
typedef CUresult (*PFN_wait64)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);
typedef CUresult (*PFN_batch)(CUstream, unsigned int, CUstreamBatchMemOpParams *, unsigned int);

template <typename T> static T find(const char *name) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion(name, &function, 13000, cudaEnableDefault, &found));
    REQUIRE(found == cudaDriverEntryPointSuccess);
    return (T)function;
}

__global__ void stir(uint32_t *data, uint32_t n, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        uint32_t x = data[i] * 0x85ebca6bu + round;
        data[i] = x ^ (x >> 13);
    }
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint32_t rounds = (uint32_t)options.number("--rounds", 60), n = (uint32_t)options.number("--words", 4096);
    uint64_t pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    cudaStream_t a, b;
    uint32_t *data, *flags;
    volatile uint32_t *host;
    CHECK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&data, n * 4));
    CHECK(cudaMalloc(&flags, 4096));
    CHECK(cudaHostAlloc((void **)&host, 4096, cudaHostAllocMapped));
    memset((void *)host, 0, 4096);
    CHECK(cudaMemset(data, 5, n * 4));
    CHECK(cudaMemset(flags, 0, 4096));
    CHECK(cudaDeviceSynchronize());
    auto write32 = find<PFN_write32>("cuStreamWriteValue32");
    auto wait32 = find<PFN_wait32>("cuStreamWaitValue32");
    auto write64 = find<PFN_write64>("cuStreamWriteValue64");
    auto wait64 = find<PFN_wait64>("cuStreamWaitValue64");
    auto batch = find<PFN_batch>("cuStreamBatchMemOp");

    // Attributes are hints, and say what was set.
    cudaStreamAttrValue set = {}, got = {};
    set.syncPolicy = cudaSyncPolicyBlockingSync;
    CHECK(cudaStreamSetAttribute(a, cudaStreamAttributeSynchronizationPolicy, &set));
    CHECK(cudaStreamCopyAttributes(b, a));

    const CUdeviceptr device = (CUdeviceptr)flags, pinned = (CUdeviceptr)host;
    const uint32_t blocks = (n + 127) / 128;
    for (uint32_t round = 1; round <= rounds; round++) {
        // To the other stream and back, by words on the device and in pinned memory.
        stir<<<blocks, 128, 0, a>>>(data, n, round);
        REQUIRE(write32(a, device, round, CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS);
        REQUIRE(wait32(b, device, round, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
        stir<<<blocks, 128, 0, b>>>(data, n, round + 1000);
        REQUIRE(write64(b, pinned + 64, round, CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS);
        REQUIRE(wait64(a, pinned + 64, round, CU_STREAM_WAIT_VALUE_EQ) == CUDA_SUCCESS);
        // From the CPU.
        REQUIRE(wait32(a, pinned, round, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
        stir<<<blocks, 128, 0, a>>>(data, n, round + 2000);
        if (round % 4 == 0) {
            CUstreamBatchMemOpParams ops[3] = {};
            ops[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
            ops[0].writeValue.address = device + 128;
            ops[0].writeValue.value = round;
            ops[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
            ops[1].writeValue.address = pinned + 128;
            ops[1].writeValue.value64 = (uint64_t)round << 33;
            ops[2].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
            ops[2].waitValue.address = device + 128;
            ops[2].waitValue.value = round;
            ops[2].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
            REQUIRE(batch(a, 3, ops, 0) == CUDA_SUCCESS);
            REQUIRE(write32(a, device + 2, 0, 0) == CUDA_ERROR_INVALID_VALUE);
        }
        sleep_us(pause_us);
        REQUIRE(cudaStreamQuery(a) == cudaErrorNotReady);
        host[0] = round;
        if (round % 3 == 0) {
            CHECK(cudaStreamSynchronize(a));
            REQUIRE(host[16] == round);
        }
        progress(progress_file, round);
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamGetAttribute(b, cudaStreamAttributeSynchronizationPolicy, &got));
    REQUIRE(got.syncPolicy == cudaSyncPolicyBlockingSync);
    REQUIRE(host[33] == rounds / 4 * 4 * 2);
    printf("attributes ok\n");
    uint32_t *out = (uint32_t *)malloc(n * 4);
    CHECK(cudaMemcpy(out, data, n * 4, cudaMemcpyDeviceToHost));
    printf("digest %016llx\n", (unsigned long long)digest(out, n * 4));
    return 0;
}

// Ends of lives: a device reset with code loaded before it, a library unloaded before a later one, streams destroyed
// while they are busy, memsets that nobody waits for, events recorded again while somebody waits.
//
//   corners [--iterations N] [--sleep-us N] [--progress FILE]      60, 0, none
//
// Prints "digest D", the same in every run with the same numbers. FILE holds the iterations done.
#include "app.h"

const uint32_t N = 1 << 14;

// Two libraries that differ in their variable's first value; each kernel adds to its own and says what it was.
#define LIBRARY(first)                                                                                                 \
    ".version 7.0\n.target sm_75\n.address_size 64\n"                                                                  \
    ".visible .global .align 8 .u64 kept = " first ";\n"                                                               \
    ".visible .entry add(.param .u64 out, .param .u64 by) {\n"                                                         \
    "  .reg .b64 %r<6>;\n"                                                                                             \
    "  ld.param.u64 %r0, [out];\n  ld.param.u64 %r1, [by];\n  cvta.to.global.u64 %r2, %r0;\n"                          \
    "  ld.global.u64 %r3, [kept];\n  st.global.u64 [%r2], %r3;\n  add.u64 %r4, %r3, %r1;\n"                            \
    "  st.global.u64 [kept], %r4;\n  ret;\n}\n"

__device__ uint64_t rounds;

__global__ void touch(uint32_t *out) { out[threadIdx.x] = (uint32_t)++rounds; }

// Takes a while, and only then writes.
__global__ void slowly(uint64_t *out, uint64_t seed, uint32_t steps) {
    uint64_t x = seed + threadIdx.x;
    for (uint32_t i = 0; i < steps; i++) {
        x = mix(x + i);
    }
    out[threadIdx.x] += x;
}

__global__ void gather(uint64_t *out, const uint32_t *in, uint32_t n) {
    uint64_t sum = 0;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        sum = sum * 31 + in[i];
    }
    out[threadIdx.x] = mix(out[threadIdx.x] + sum);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 60), pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    // Code that was loaded before a reset belongs to no context, and is there after it.
    uint32_t *early;
    CHECK(cudaMalloc(&early, 256));
    touch<<<1, 1>>>(early);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaDeviceReset());

    cudaLibrary_t first, second;
    cudaKernel_t add_first, add_second;
    CHECK(cudaLibraryLoadData(&first, LIBRARY("5"), nullptr, nullptr, 0, nullptr, nullptr, 0));
    CHECK(cudaLibraryLoadData(&second, LIBRARY("7"), nullptr, nullptr, 0, nullptr, nullptr, 0));
    CHECK(cudaLibraryGetKernel(&add_first, first, "add"));
    CHECK(cudaLibraryGetKernel(&add_second, second, "add"));
    uint64_t *said, *slow, *sums;
    uint32_t *filled;
    CHECK(cudaMalloc(&said, 8));
    CHECK(cudaMalloc(&slow, 32 * 8));
    CHECK(cudaMalloc(&sums, 32 * 8));
    CHECK(cudaMalloc(&filled, N * 4));
    CHECK(cudaMemset(slow, 0, 32 * 8));
    CHECK(cudaMemset(sums, 0, 32 * 8));
    uint64_t by = 1;
    void *arguments[] = {&said, &by};
    CHECK(cudaLaunchKernel((const void *)add_first, dim3(1), dim3(1), arguments, 0, 0));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaLibraryUnload(first));

    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    uint64_t state = 0;
    for (uint64_t i = 1; i <= iterations; i++) {
        // A stream that is destroyed at once: what is in it still happens.
        cudaStream_t stream;
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        slowly<<<1, 32, 0, stream>>>(slow, i, 20000);
        CHECK(cudaStreamDestroy(stream));
        // In the default stream, one after the other, and waited for by nobody.
        CHECK(cudaMemset(filled, (int)(i & 255), N * 4));
        gather<<<1, 32>>>(sums, filled, N);
        by = i;
        CHECK(cudaLaunchKernel((const void *)add_second, dim3(1), dim3(1), arguments, 0, 0));
        CHECK(cudaEventRecord(event, 0));
        CHECK(cudaEventSynchronize(event));
        progress(progress_file, i);
        sleep_us(pause_us);
        // Everything, destroyed streams included.
        CHECK(cudaDeviceSynchronize());
        uint64_t host[32];
        CHECK(cudaMemcpy(host, slow, sizeof host, cudaMemcpyDeviceToHost));
        state = digest(host, sizeof host, state);
    }
    uint64_t host[32], last;
    CHECK(cudaMemcpy(host, sums, sizeof host, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&last, said, sizeof last, cudaMemcpyDeviceToHost));
    state = digest(host, sizeof host, state);
    REQUIRE(last == 7 + iterations * (iterations - 1) / 2);
    printf("digest %016llx\n", (unsigned long long)state);
    return 0;
}

// Pinned memory of every kind, and mapped memory that kernels read while the CPU writes it: each kernel waits for the CPU
// step by step, and the CPU for the kernel.
//
//   mapped [--iterations N] [--words N] [--sleep-us N] [--progress FILE]
//          60, 1024, 0, none
//
// Prints "flags ok" and "digest D", the same in every run with the same numbers. FILE holds the iterations done.
#include "app.h"

#define STEPS 8

struct Board {
    volatile uint32_t step;     // the CPU's: how many steps of `words` are there
    volatile uint32_t answered; // the kernel's: how many it has taken
    volatile uint32_t sum[STEPS];
    volatile uint32_t words[1]; // and more
};

__global__ void follow(Board *board, uint32_t n, uint32_t *total) {
    __shared__ uint32_t sum;
    for (uint32_t step = 0; step < STEPS; step++) {
        if (threadIdx.x == 0) {
            while (board->step <= step) {
            }
            sum = 0;
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
            atomicAdd(&sum, board->words[step * n + i]);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            board->sum[step] = sum;
            *total = *total * 31u + sum;
            __threadfence_system();
            board->answered = step + 1;
        }
        __syncthreads();
    }
}

static void flags() {
    unsigned kinds[] = {cudaHostAllocDefault, cudaHostAllocPortable, cudaHostAllocMapped, cudaHostAllocWriteCombined,
                        cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined};
    for (unsigned kind : kinds) {
        uint32_t *host, *device;
        CHECK(cudaHostAlloc(&host, 10000, kind));
        unsigned got = 99;
        CHECK(cudaHostGetFlags(&got, host));
        REQUIRE((got & kind) == kind);
        CHECK(cudaHostGetDevicePointer(&device, host, 0));
        cudaPointerAttributes attributes;
        CHECK(cudaPointerGetAttributes(&attributes, (char *)host + 9999));
        REQUIRE(attributes.type == cudaMemoryTypeHost && attributes.hostPointer == (char *)host + 9999);
        host[7] = kind + 1;
        CHECK(cudaMemset(device, 0, 16));
        CHECK(cudaDeviceSynchronize());
        REQUIRE(host[3] == 0 && host[7] == kind + 1);
        CHECK(cudaFreeHost(host));
        REQUIRE(cudaHostGetFlags(&got, host) == cudaErrorInvalidValue);
        REQUIRE(cudaGetLastError() == cudaErrorInvalidValue);
    }
    void *none;
    REQUIRE(cudaHostAlloc(&none, 100, 64) == cudaErrorInvalidValue);
    REQUIRE(cudaGetLastError() == cudaErrorInvalidValue);
    int plain;
    REQUIRE(cudaFreeHost(&plain) == cudaErrorInvalidValue);
    REQUIRE(cudaGetLastError() == cudaErrorInvalidValue);
    CHECK(cudaMallocHost(&none, 100));
    CHECK(cudaFreeHost(none));
    printf("flags ok\n");
    fflush(stdout);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 60), pause_us = options.number("--sleep-us", 0);
    uint32_t n = (uint32_t)options.number("--words", 1024);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(n > 0);
    flags();

    Board *board, *seen;
    CHECK(cudaHostAlloc(&board, sizeof(Board) + STEPS * n * 4, cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(&seen, board, 0));
    uint32_t *total;
    CHECK(cudaMalloc(&total, 4));
    CHECK(cudaMemset(total, 0, 4));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaDeviceSynchronize());
    uint64_t state = 0;
    for (uint64_t round = 1; round <= iterations; round++) {
        board->step = board->answered = 0;
        follow<<<1, 64, 0, stream>>>(seen, n, total);
        CHECK(cudaGetLastError());
        for (uint32_t step = 0; step < STEPS; step++) {
            uint32_t expected = 0;
            for (uint32_t i = 0; i < n; i++) {
                uint32_t word = (uint32_t)mix(round * STEPS * n + step * n + i);
                board->words[step * n + i] = word;
                expected += word;
            }
            __sync_synchronize();
            board->step = step + 1;
            while (board->answered <= step) {
            }
            REQUIRE(board->sum[step] == expected);
            sleep_us(pause_us / STEPS);
        }
        CHECK(cudaStreamSynchronize(stream));
        uint32_t sum;
        CHECK(cudaMemcpy(&sum, total, 4, cudaMemcpyDeviceToHost));
        state = digest(&sum, 4, state);
        progress(progress_file, round);
    }
    CHECK(cudaFreeHost(board));
    CHECK(cudaFree(total));
    printf("digest %016llx\n", (unsigned long long)state);
    return 0;
}
